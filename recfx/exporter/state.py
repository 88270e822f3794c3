"""What calls of a model change. Buffers may change, and do so in the file as well. Nothing else may: a file does not
keep it, and copies of the model share it with the user's.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.copy_modules import attributes
from recfx.discovery.attribute_reads import AttributeReads
from recfx.errors import ExportError

_PLAIN = (bool, int, float, complex, str, bytes, frozenset)


def not_in_collections(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model, by path, without its converted collections and what is in them."""
    inside = {
        id(part) for module in model.modules() if isinstance(module, ConvertedCollection) for part in module.modules()
    }
    return ((path, module) for path, module in model.named_modules() if id(module) not in inside)


def storage_of(tensor: torch.Tensor) -> int | None:
    """What is equal for tensors that share their memory; None if the tensor has none of its own."""
    if is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_meta:
        return None
    return tensor.untyped_storage()._cdata


def tensors_of_modules(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters, buffers, and tensors in attributes of the modules that are in no collection, with their paths."""
    for path, module in not_in_collections(model):
        prefix = f"{path}." if path else ""
        registered = [*module._parameters.items(), *module._buffers.items()]
        for name, value in [*registered, *((name, value) for name, value in attributes(module))]:
            for leaf in [value] if isinstance(value, torch.Tensor) else _leaves(value, ()):
                if isinstance(leaf, torch.Tensor):
                    yield f"{prefix}{name}", leaf


class Unchanged(TorchDispatchMode):
    """A context in which nothing may write into the tensors of a model, which its copies share.

    Raises:
        ExportError: ``changes_state``, before the tensor is written.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._paths = {storage_of(tensor): path for path, tensor in tensors_of_modules(model)}
        self._paths.pop(None, None)
        self._changed = ""

    def __exit__(self, kind: Any, error: Any, where: Any) -> None:
        super().__exit__(kind, error, where)
        if self._changed and not isinstance(error, ExportError):  # TorchScript makes another error of it
            raise changes_state(self._changed) from error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for number, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[number] if number < len(args) else kwargs.get(argument.name)
                    for tensor in tree_leaves(given):
                        if isinstance(tensor, torch.Tensor) and (path := self._paths.get(storage_of(tensor))):
                            self._changed = path
                            raise changes_state(path)
        return func(*args, **kwargs)


def changes_state(path: str) -> ExportError:
    """The error of a model that changes what its file would not keep."""
    return ExportError(
        f"a call of the model in eval mode changes {path!r}, which a file would not keep.",
        reason="changes_state",
        module_path=path.rpartition(".")[0],
        what_to_do="register it as a buffer of its own, which files keep, or leave it alone in eval mode.",
    )


@contextlib.contextmanager
def refusing_changed_attributes(copy: nn.Module) -> Iterator[None]:
    """A context for one call of a copy, which may not change an attribute that it has read before: the next call would
    depend on it. What a call only leaves behind is no state.

    Raises:
        ExportError: ``changes_state``.
    """
    reads = AttributeReads(dict(not_in_collections(copy)), _content)
    with reads.recorded():
        yield
    if (path := reads.changed()) is not None:
        raise changes_state(path)


def _content(module: nn.Module, name: str) -> Any:
    return _Content(object.__getattribute__(module, "__dict__").get(name))  # without the read that is being recorded


class _Content:
    """What an attribute holds when this is made: equal if nothing in it was replaced or written."""

    def __init__(self, value: Any) -> None:
        self._leaves = list(_leaves(value, ()))

    def __deepcopy__(self, memo: Any) -> _Content:
        return self

    def __eq__(self, other: Any) -> bool:
        return len(self._leaves) == len(other._leaves) and all(
            old is new
            or (type(old) is type(new) and isinstance(old, _PLAIN) and (old == new or (old != old and new != new)))
            for old, new in zip(self._leaves, other._leaves, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]


def _leaves(value: Any, around: tuple[int, ...]) -> Iterator[Any]:
    """What an attribute holds, inside containers and plain objects, as it is now."""
    if id(value) in around or isinstance(value, (nn.Module, type)) or callable(value):
        return
    around = (*around, id(value))
    if isinstance(value, torch.Tensor):
        yield value
        yield None if value.is_inference() else value._version
    elif isinstance(value, (dict, list, tuple, deque)):
        for item in chain.from_iterable(value.items()) if isinstance(value, dict) else value:
            yield from _leaves(item, around)
    elif isinstance(value, (set, frozenset)):
        yield frozenset(value)
    elif isinstance(value, numpy.ndarray):
        yield value.tobytes()
    else:
        yield value
        if type(value).__module__.partition(".")[0] not in ("torch", "torchrec"):
            yield from _leaves(getattr(value, "__dict__", ()), around)
