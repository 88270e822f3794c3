"""Nests of dicts, lists, tuples and dataclasses, in which models take and return tensors.

``torch.utils._pytree`` takes a dataclass for a leaf, unless its class was registered for the whole process.
"""

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torchrec.distributed.types import LazyAwaitable


class Nest(NamedTuple):
    """A value with others inside."""

    kind: str  # ``"dict"``, ``"list"``, ``"tuple"``, ``"named tuple"`` or ``"dataclass"``
    items: dict[Any, Any]  # by key, field or number; of a dataclass also what was set on it besides its fields
    make: Callable[[Sequence[Any]], Any]  # makes a value like it around other items


def nest_of(value: Any) -> Nest | None:
    """What is inside a value; None if it is a leaf: a tensor, a KJT, or anything else."""
    if isinstance(value, dict):
        return Nest("dict", value, lambda items: _dict_like(value, dict(zip(value, items, strict=True))))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = dict(zip(value._fields, value, strict=True))
        return Nest("named tuple", fields, lambda items: type(value)(*items))
    if isinstance(value, (list, tuple)):
        kind = list if isinstance(value, list) else tuple
        return Nest(kind.__name__, {str(number): item for number, item in enumerate(value)}, kind)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = list(
            dict.fromkeys([*(field.name for field in dataclasses.fields(value)), *getattr(value, "__dict__", ())])
        )

        def make(items: Sequence[Any]) -> Any:
            duplicate = copy.copy(value)  # without its __init__, which may have other arguments
            for name, item in zip(names, items, strict=True):
                object.__setattr__(duplicate, name, item)
            return duplicate

        return Nest("dataclass", {name: getattr(value, name) for name in names}, make)
    return None


def _dict_like(value: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """A dict with other items under the same keys; of its class only if that is one of the standard library."""
    if type(value) is defaultdict:
        return defaultdict(value.default_factory, items)
    return OrderedDict(items) if type(value) is OrderedDict else items


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of a nest, in order; of the output of a sharded collection, what it waits for."""
    if isinstance(value, LazyAwaitable):
        value = value.wait()
    nest = nest_of(value)
    if nest is None:
        yield value
    else:
        for item in nest.items.values():
            yield from leaves_of(item)


def change_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A nest like this one, with changed leaves."""
    nest = nest_of(value)
    return change(value) if nest is None else nest.make([change_leaves(item, change) for item in nest.items.values()])
