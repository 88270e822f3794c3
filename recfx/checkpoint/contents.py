"""What a checkpoint may contain: the names and dtypes of its tensors, and the errors for those that do not fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recfx.errors import CheckpointError, type_of

MODEL, IN_BACKWARD, OPTIMIZER, SETTINGS = "model.", "in_backward.", "optimizer.", "settings"
BUILD_AS_SAVED = "build the model as it was built when saving."
_MOST_NAMED = 10
_LONGEST_NAME = 300
_Value = TypeVar("_Value")


def with_prefix(described: Mapping[str, _Value], prefix: str) -> dict[str, _Value]:
    """The values whose names begin with ``prefix``, by name without the prefix."""
    return {name[len(prefix) :]: tensor for name, tensor in described.items() if name.startswith(prefix)}


def check_names(what: str, expected: Collection[str], saved: Collection[str], what_to_do: str) -> None:
    """Raise if a checkpoint lacks something, or has something that is not used here.

    Args:
        what: what stands before the names in the message, with a space at its end; "" if they say it themselves.
        expected: the names here.
        saved: the names in the checkpoint.
        what_to_do: the advice.

    Raises:
        CheckpointError: ``checkpoint_mismatch``, naming both.
    """
    saved_names, here = set(saved), set(expected)
    missing = [name for name in expected if name not in saved_names]
    unexpected = [name for name in saved if name not in here]
    parts = [f"lacks {what}{_listed(missing)}"] if missing else []
    parts += [f"has {what}{_listed(unexpected)}, which this model does not have"] if unexpected else []
    if parts:
        raise mismatch(f"the checkpoint {' and '.join(parts)}.", what_to_do=what_to_do)


def mismatch(message: str, *, module_path: str = "", what_to_do: str = BUILD_AS_SAVED) -> CheckpointError:
    """The error for a checkpoint of a different model."""
    return CheckpointError(message, reason="checkpoint_mismatch", module_path=module_path, what_to_do=what_to_do)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(map(_printable, names[:_MOST_NAMED])) + more


def _printable(name: str) -> str:
    cut = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    return cut if cut.isprintable() else ascii(cut)


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose content is not simply its elements, such as a quantized or a sparse one.

    Raises:
        CheckpointError: ``value_not_supported``.
    """
    value: object = tensor
    if is_traceable_wrapper_subclass(value):  # such as DTensor, whose elements are in other tensors
        raise CheckpointError(
            f"{name} is {type_of(value)}.",
            reason="value_not_supported",
            what_to_do="save such a model with torch.distributed.checkpoint.",
        )
    if tensor.layout == torch.strided and not tensor.is_quantized:
        return
    raise CheckpointError(
        f"{name} is a tensor of dtype {tensor.dtype} and layout {tensor.layout}.",
        reason="value_not_supported",
        what_to_do="save it by other means, and register it with persistent=False.",
    )


def check_loadable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that nothing can be loaded into, before torch does so halfway through.

    Raises:
        CheckpointError: ``value_not_supported``.
    """
    check_storable(name, tensor)
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise CheckpointError(
            f"{name} is expanded: some of its elements share memory, so nothing can be loaded into it.",
            reason="value_not_supported",
            what_to_do="register a clone() of the tensor.",
        )


def check_has_elements(state: Mapping[str, object], on_meta: str, what_to_do: str) -> None:
    """Refuse parameters of lazy modules, which have no shape yet, and tensors on the meta device.

    Args:
        state: tensors by name; anything else in it is ignored.
        on_meta: what to say about a tensor on meta.
        what_to_do: the advice for a tensor on meta.

    Raises:
        CheckpointError: ``model_is_lazy``, ``model_on_meta``.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        if is_lazy(tensor):
            raise CheckpointError(
                f"{name} has no shape yet: its module is lazy.",
                reason="model_is_lazy",
                what_to_do="call the model on one batch first.",
            )
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise CheckpointError(f"{name} {on_meta}.", reason="model_on_meta", what_to_do=what_to_do)


def check_saved_as(
    name: str, saved: Tensor, dtype: torch.dtype, shape: tuple[int, ...], loadable: tuple[int, ...]
) -> None:
    """Check the dtype and the shape of a saved tensor, given those here and the only shape that can be loaded.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    if tuple(saved.shape) != loadable or saved.dtype != dtype:
        raise mismatch(f"{name} was saved as {saved.dtype} {tuple(saved.shape)}, but is {dtype} {shape} here.")
