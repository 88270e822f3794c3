"""What a converted model records about its conversion: plain data, so that it is copied and pickled with the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from recfx.collections.wrappers import unwrap
from recfx.errors import Diagnostic
from recfx.ir.meta import SourceLocation
from recfx.models.classify import CONVERTED, CONVERTIBLE
from recfx.models.discover import Discovery
from recfx.models.verify_report import VerifyReport

_ATTRIBUTE = "_recfx_conversion"


@dataclass(frozen=True)
class Found:
    """A collection as it was found: see :class:`recfx.models.discover.Finding`."""

    paths: tuple[str, ...]
    kind: str
    status: str
    why: Diagnostic | None
    found: str
    source: SourceLocation | None
    call_sites: tuple[SourceLocation, ...] = ()


@dataclass
class Conversion:
    """What was found and compared in one conversion."""

    found: list[Found]  # every collection, converted or not
    rollbacks: list[Diagnostic]  # modules that the trace could not enter
    on_unsupported: str
    verification: VerifyReport | None = None  # what ``convert`` compared, if it did
    notes: list[Diagnostic] = field(default_factory=list)  # anything else worth reporting
    warned: set[tuple[str, str]] = field(default_factory=set)  # code and path of those given as Python warnings


def attach_conversion(model: nn.Module, conversion: Conversion) -> None:
    """Attach ``conversion`` to the model inside its wrappers."""
    if not isinstance(unwrap(model), torch.jit.ScriptModule):  # which is shared with the user's model
        unwrap(model).__dict__[_ATTRIBUTE] = conversion


def add_notes(model: nn.Module, notes: Sequence[Diagnostic]) -> None:
    """Give the model a record with more notes; models with which it shared its record keep theirs."""
    if notes:
        conversion = conversion_of(model)
        attach_conversion(model, replace(conversion, notes=[*conversion.notes, *notes]))


def detach_conversion(model: nn.Module) -> None:
    """Forget the conversion: the model is a plain model again."""
    unwrap(model).__dict__.pop(_ATTRIBUTE, None)


def conversion_of(model: nn.Module) -> Conversion:
    """The record that is attached to the model; an empty one for collections that were built directly."""
    record: Any = unwrap(model).__dict__.get(_ATTRIBUTE)
    return record if isinstance(record, Conversion) else Conversion([], [], "error")


def recorded(discovery: Discovery, on_unsupported: str, before: Conversion | None = None) -> Conversion:
    """The record of ``discovery``; collections that were converted ``before`` keep the records they have."""
    earlier = {} if before is None else {record.paths[0]: record for record in before.found}
    records = [
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
    return Conversion(records, list(discovery.rollbacks), on_unsupported)
