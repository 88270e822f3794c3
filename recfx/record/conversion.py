"""What a converted model remembers of its conversion: plain data, so that it is copied and pickled with the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from recfx.ir.meta import SourceLocation
from recfx.record.verify_report import VerifyReport
from recfx.record.wrappers import unwrap

_ATTRIBUTE = "_recfx_conversion"


@dataclass(frozen=True)
class Rollback:
    """A module that became an opaque leaf.

    Args:
        module_path: its fully qualified name; ``""`` for the root.
        reason: reason code.
        message: what the trace stumbled over.
    """

    module_path: str
    reason: str
    message: str


@dataclass(frozen=True)
class Found:
    """A collection as it was found: see :class:`recfx.discovery.discover.Finding`."""

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


def attach_conversion(model: nn.Module, conversion: Conversion) -> None:
    """Hang ``conversion`` on the model (inside its wrappers)."""
    if not isinstance(unwrap(model), torch.jit.ScriptModule):  # is shared with the user's model
        unwrap(model).__dict__[_ATTRIBUTE] = conversion


def detach_conversion(model: nn.Module) -> None:
    """Forget the conversion: the model is a plain one again."""
    unwrap(model).__dict__.pop(_ATTRIBUTE, None)


def conversion_of(model: nn.Module) -> Conversion:
    """What hangs on the model; an empty record for collections that were built directly."""
    found: Any = unwrap(model).__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Conversion) else Conversion([], [], "error")
