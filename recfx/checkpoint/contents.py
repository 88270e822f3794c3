"""What a checkpoint may contain: the names and dtypes of its tensors, and the errors for those that do not fit."""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recfx.errors import CheckpointError, few, type_of

MODEL, OPTIMIZER, SETTINGS = "model.", "optimizer.", "settings"
BUILD_AS_SAVED = "build the model and its optimizers as they were built when saving."
_Value = TypeVar("_Value")


def with_prefix(described: Mapping[str, _Value], prefix: str) -> dict[str, _Value]:
    """The values whose names begin with ``prefix``, by name without the prefix."""
    return {name[len(prefix) :]: tensor for name, tensor in described.items() if name.startswith(prefix)}


def check_names(
    what: str, expected: Collection[str], saved: Collection[str], what_to_do: str, module_path: str = ""
) -> None:
    """Raise ``checkpoint_mismatch`` if names are missing in a checkpoint, or not used here; ``what`` precedes them."""
    saved_names, here = set(saved), set(expected)
    missing = [name for name in expected if name not in saved_names]
    unexpected = [name for name in saved if name not in here]
    parts = [f"lacks {what}{few(missing, 10)}"] if missing else []
    parts += [f"has {what}{few(unexpected, 10)}, which this model does not have"] if unexpected else []
    if parts:
        raise mismatch(f"the checkpoint {' and '.join(parts)}.", module_path=module_path, what_to_do=what_to_do)


def mismatch(message: str, *, module_path: str = "", what_to_do: str = BUILD_AS_SAVED) -> CheckpointError:
    """The error for a checkpoint of a different model."""
    return CheckpointError(message, reason="checkpoint_mismatch", module_path=module_path, what_to_do=what_to_do)


@contextlib.contextmanager
def refused_as(subject: str, module_path: str) -> Iterator[None]:
    """Turn errors that foreign code raises about saved values into a ``CheckpointError``."""
    try:
        yield
    except Exception as error:
        message = f"{subject} does not accept what was saved ({type(error).__name__}: {error})."
        raise mismatch(message, module_path=module_path) from error


def check_tensor(name: str, tensor: Tensor) -> None:
    """Refuse a tensor without elements, or that shares or lacks some: nothing can be saved of it or loaded into it."""
    value: object = tensor
    if is_lazy(tensor):
        raise _refused(f"{name} has no shape yet.", "call the model on one batch first.", reason="model_is_lazy")
    if is_traceable_wrapper_subclass(value):  # such as DTensor, whose elements are in other tensors
        raise _refused(f"{name} is {type_of(value)}.", "save such a model with torch.distributed.checkpoint.")
    if tensor.is_meta:
        what_to_do = "call to_empty(device=...) first, and initialise the model or load into it."
        raise _refused(f"{name} is on the meta device.", what_to_do, reason="model_on_meta")
    if tensor.layout != torch.strided or tensor.is_quantized:
        message = f"{name} is a tensor of dtype {tensor.dtype} and layout {tensor.layout}."
        raise _refused(message, "save it by other means, and register it with persistent=False.")
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise _refused(f"{name} is expanded: some of its elements share memory.", "register a clone() of the tensor.")


def _refused(message: str, what_to_do: str, reason: str = "value_not_supported") -> CheckpointError:
    return CheckpointError(message, reason=reason, what_to_do=what_to_do)


def check_saved_as(
    name: str, saved: Tensor, dtype: torch.dtype, shape: tuple[int, ...], loadable: tuple[int, ...]
) -> None:
    """Check the dtype and the shape of a saved tensor, given those here and the only shape that can be loaded."""
    if tuple(saved.shape) != loadable or saved.dtype != dtype:
        raise mismatch(f"{name} was saved as {saved.dtype} {tuple(saved.shape)}, but is {dtype} {shape} here.")
