"""The prefixes of the names of a checkpoint's tensors, and the error for names and shapes that differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from recfx.errors import CheckpointError

MODEL, IN_BACKWARD, OPTIMIZER, SETTINGS = "model.", "in_backward.", "optimizer.", "settings"
_MOST_NAMED = 10
_LONGEST_NAME = 300


def with_prefix(described: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, by name without the prefix."""
    return {name[len(prefix) :]: tensor for name, tensor in described.items() if name.startswith(prefix)}


def check_names(what: str, wanted: Collection[str], saved: Collection[str], what_to_do: str) -> None:
    """Raise if a checkpoint lacks something, or has something that is not used here.

    Raises:
        CheckpointError: ``checkpoint_mismatch``, naming both.
    """
    known, here = set(saved), set(wanted)
    missing = [name for name in wanted if name not in known]
    unexpected = [name for name in saved if name not in here]
    parts = [f"lacks {_listed(missing)}"] if missing else []
    parts += [f"has {_listed(unexpected)}, which this model does not have"] if unexpected else []
    if parts:
        raise mismatch(f"the checkpoint {' and '.join(parts)} ({what}).", what_to_do=what_to_do)


def mismatch(message: str, *, module_path: str = "", what_to_do: str) -> CheckpointError:
    """The error for a checkpoint of a different model."""
    return CheckpointError(message, reason="checkpoint_mismatch", module_path=module_path, what_to_do=what_to_do)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(map(_printable, names[:_MOST_NAMED])) + more


def _printable(name: str) -> str:
    cut = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    return cut if cut.isprintable() else ascii(cut)
