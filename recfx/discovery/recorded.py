"""What discovery found, as a converted model records it."""

from __future__ import annotations

from recfx.discovery.classify import CONVERTED, CONVERTIBLE
from recfx.discovery.conversion_record import Conversion, Found
from recfx.discovery.discover import Discovery


def recorded(discovery: Discovery, on_unsupported: str, before: Conversion | None = None) -> Conversion:
    """The record of ``discovery``; collections that were converted ``before`` keep the records they have."""
    earlier = {} if before is None else {record.paths[0]: record for record in before.found}
    found = [
        earlier[finding.path]
        if finding.status == CONVERTED and finding.path in earlier
        else Found(
            tuple(finding.paths),
            type(finding.module).__name__,
            "converted" if finding.status == CONVERTIBLE else finding.status,
            finding.why,
            finding.found,
            finding.source,
            finding.call_sites,
        )
        for finding in discovery.findings
    ]
    return Conversion(found, list(discovery.rollbacks), on_unsupported)
