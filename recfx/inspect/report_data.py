"""The report as data: frozen, complete, versioned. Text, JSON and HTML are made from it."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.discovery.verify_report import DIFFERENT, VerifyReport
from recfx.errors import Diagnostic
from recfx.inspect.collection_report import CollectionReport

REPORT_VERSION = "1"


@dataclass(frozen=True)
class Verification:
    """What the conversion compared: if no comparison was run, ``ok`` is None and ``text`` says why."""

    ok: bool | None
    text: str

    @classmethod
    def of(cls, found: VerifyReport) -> Verification:
        """What a comparison has found; that nothing could be compared is no difference."""
        return cls(found.ok if found.ok or found.of(DIFFERENT) else None, str(found))


@dataclass(frozen=True)
class ReportData:
    """Everything that a :class:`recfx.inspect.report.Report` shows.

    Args:
        version: the version of this schema; it changes when a field changes its meaning or is removed.
        recfx_version: the version that made the report.
        torch_version: the version that it ran under.
        torchrec_version: the version that it ran under.
        ok: False if any reason is an error: a collection is refused, the model has no collection, or verification
            failed.
        collections: every collection, converted or not, in the order of the model.
        reasons: everything worth knowing, errors first.
        rollbacks: modules that the trace could not enter.
        verification: what ``convert`` compared.
        notes: those of ``reasons`` that the conversion itself recorded.
    """

    version: str
    recfx_version: str
    torch_version: str
    torchrec_version: str
    ok: bool
    collections: tuple[CollectionReport, ...]
    reasons: tuple[Diagnostic, ...]
    rollbacks: tuple[Diagnostic, ...]
    verification: Verification
    notes: tuple[Diagnostic, ...] = ()
