"""What a converted model remembers of its conversion: plain data, so that it is copied and pickled with the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recfx.classify import CONVERTED, CONVERTIBLE
from recfx.discovery import Discovery, unwrap
from recfx.ir.meta import SourceLocation
from recfx.tracing import Rollback

if TYPE_CHECKING:
    from recfx.verify_report import VerifyReport

_ATTRIBUTE = "_recfx_conversion"


@dataclass(frozen=True)
class Found:
    """A collection as it was found: see :class:`recfx.discovery.Finding`."""

    paths: tuple[str, ...]
    kind: str
    status: str
    reason: str
    message: str
    what_to_do: str
    found: str
    source: SourceLocation | None


@dataclass(frozen=True)
class Note:
    """Something that the report must say."""

    reason: str
    module_path: str
    message: str
    what_to_do: str


@dataclass
class Conversion:
    """Discovery and verification of one conversion.

    Args:
        found: every collection, converted or not.
        rollbacks: modules that the trace could not enter.
        verification: what ``convert`` compared, if it did.
        on_unsupported: ``"error"`` or ``"keep"``.
        notes: anything else worth a line.
    """

    found: list[Found]
    rollbacks: list[Rollback]
    on_unsupported: str
    verification: VerifyReport | None = None
    notes: list[Note] = field(default_factory=list)

    @classmethod
    def of(cls, discovery: Discovery, on_unsupported: str, before: Conversion | None = None) -> Conversion:
        """From what was discovered; what was converted ``before`` keeps its record."""
        earlier = {} if before is None else {record.paths[0]: record for record in before.found}
        found = [
            earlier[finding.path]
            if finding.status == CONVERTED and finding.path in earlier
            else Found(
                tuple(finding.paths),
                type(finding.module).__name__,
                "converted" if finding.status == CONVERTIBLE else finding.status,
                finding.reason,
                finding.message,
                finding.what_to_do,
                finding.found,
                finding.source,
            )
            for finding in discovery.findings
        ]
        return cls(found, list(discovery.rollbacks), on_unsupported)


def attach_conversion(model: nn.Module, conversion: Conversion) -> None:
    """Hang ``conversion`` on the model (inside its wrappers)."""
    if not isinstance(unwrap(model), torch.jit.ScriptModule):  # has no shell of its own: it is the user's
        unwrap(model).__dict__[_ATTRIBUTE] = conversion


def detach_conversion(model: nn.Module) -> None:
    """Forget the conversion: the model is a plain one again."""
    unwrap(model).__dict__.pop(_ATTRIBUTE, None)


def conversion_of(model: nn.Module) -> Conversion:
    """What hangs on the model; an empty record for collections that were built directly."""
    found: Any = unwrap(model).__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Conversion) else Conversion([], [], "error")
