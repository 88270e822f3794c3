"""What a model takes and returns as patterns: nests of tensors and KJTs, with a name for each of these.

TorchScript knows neither dataclasses nor dictionaries of different things, and a trace cannot iterate over a dictionary
that it does not see. So an exported program takes and returns the tensors and KJTs, one after the other.
"""

from __future__ import annotations

import dataclasses
import json
import keyword
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.discovery.nests import nest_of
from recfx.errors import ExportError


def identifier(path: str, taken: Collection[str]) -> str:
    """A readable identifier for a path, different from those that are taken."""
    name = re.sub(r"\W", "_", path, flags=re.ASCII)
    if not name or name[0].isdigit() or keyword.iskeyword(name):
        name = f"module_{name}"
    free, number = name, 1
    while free in taken:
        free, number = f"{name}_{number}", number + 1
    return free


_RESERVED = ("self", "torch", "NoneType", "__call")
"""Names that the code of an exported program needs itself."""


@dataclass(frozen=True)
class Pattern:
    """What one argument looks like, or a part of it.

    Args:
        kind: ``"tensor"``, ``"kjt"``, ``"constant"``, ``"dict"``, ``"list"``, ``"tuple"`` or ``"dataclass"``; of what
            is returned also ``"jagged"`` and ``"keyed_tensor"``.
        name: for a tensor or KJT, the name of the exported program's argument.
        keys: the keys of a dict, the fields of a dataclass, the numbers of a list or tuple (in files that earlier
            versions wrote, only of what is returned), or the sample's keys of a KJT.
        items: the pattern of each item of a dict, list, tuple or dataclass.
        value: the value of a constant, which the exported program has built in; for a tensor, the sample's number of
            dimensions, and whether it is of floats; for a keyed tensor, the columns of each key.
        is_weighted: whether a KJT or a jagged tensor has weights.
        type_name: the name of a tensor's dtype, or of the class of a dataclass or of a dict that is an argument; older
            files lack those of dtypes and dicts.
        make: makes a nest of its items; None after loading.
    """

    kind: str
    name: str = ""
    keys: tuple[str, ...] = ()
    items: tuple[Pattern, ...] = ()
    value: Any = None
    is_weighted: bool = False
    type_name: str = ""
    make: Any = dataclasses.field(default=None, compare=False)

    def leaves(self) -> Iterator[Pattern]:
        """The tensors and KJTs in it, in order."""
        if self.name:
            yield self
        for item in self.items:
            yield from item.leaves()

    @property
    def parts(self) -> list[str]:
        """The methods that give the tensors of a leaf; ``""`` for a tensor itself."""
        if self.kind in ("kjt", "jagged"):
            return ["values", "lengths", *["weights"] * self.is_weighted]
        return ["values"] if self.kind == "keyed_tensor" else [""]

    def children(self, value: Any) -> Iterator[tuple[str, Pattern, Any]]:
        """The parts of a value that looks like this, or of a proxy of one: their keys, patterns, and the parts."""
        for number, item in enumerate(self.items):
            key = self.keys[number] if self.keys else str(number)
            if self.kind == "dataclass":
                yield key, item, getattr(value, key)
            else:
                yield key, item, value[key if self.kind == "dict" else number]


def pattern_of(
    value: Any, name: str, refusal: Callable[[str, Any], ExportError], taken: set[str] | None = None
) -> Pattern:
    """The pattern of a value. Inside, names are ``<name>.<key>``; of an argument, for which ``taken`` has the
    identifiers that are taken, they are identifiers. ``refusal`` makes the error for a part that no file can have.
    """
    if isinstance(value, LazyAwaitable):
        value = value.wait()
    leaf = _leaf(value, is_argument=taken is not None)
    if leaf is not None:
        if leaf.kind == "constant":
            return leaf
        if taken is not None:
            name = identifier(name, {*taken, *_RESERVED})
            taken.add(name)
        return dataclasses.replace(leaf, name=name)
    nest = nest_of(value)
    if nest is None or not all(isinstance(key, str) for key in nest.items):
        raise refusal(name, value)
    kind, items = nest.kind, nest.items
    if kind == "dataclass" and taken is None:  # a trace makes proxies of the fields, and anything of the rest
        items = {field.name: items[field.name] for field in dataclasses.fields(value)}
    if kind == "named tuple":
        kind = "tuple" if taken is None else "dataclass"
        items = items if taken is not None else {str(number): item for number, item in enumerate(value)}
    separator = "." if taken is None else "_"
    parts = tuple(pattern_of(item, f"{name}{separator}{key}", refusal, taken) for key, item in items.items())
    is_class = kind == "dataclass" or (kind == "dict" and taken is not None)
    type_name = type(value).__name__ if is_class else ""
    return Pattern(kind, "", tuple(items), parts, type_name=type_name, make=nest.make)


def _leaf(value: Any, is_argument: bool) -> Pattern | None:
    if isinstance(value, torch.Tensor):
        described = {"dimensions": value.dim(), "floats": value.is_floating_point()}
        return Pattern("tensor", value=described, type_name=dtype_of(value))
    if isinstance(value, KeyedJaggedTensor):
        return Pattern("kjt", keys=tuple(value.keys()), is_weighted=value.weights_or_none() is not None)
    if isinstance(value, TensorDict) and is_argument:
        return Pattern("kjt", keys=tuple(value.keys()))
    if not is_argument and not _is_usual(value):
        return None
    if isinstance(value, JaggedTensor) and not is_argument:
        return Pattern("jagged", is_weighted=value.weights_or_none() is not None)
    if isinstance(value, KeyedTensor) and not is_argument:
        return Pattern("keyed_tensor", keys=tuple(value.keys()), value=list(value.length_per_key()))
    return Pattern("constant", value=value) if is_plain(value) else None


def _is_usual(value: Any) -> bool:
    """Whether values and lengths, or values and keys, are all there is to a jagged or keyed tensor."""
    if isinstance(value, KeyedTensor):
        return bool(value.key_dim() == 1)
    if not isinstance(value, JaggedTensor):
        return True
    offsets, lengths = value.offsets(), value.lengths()
    known = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return offsets.is_meta or (torch.equal(offsets, known.to(offsets)) and int(offsets[-1]) == len(value.values()))


def dtype_of(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def rebuild(pattern: Pattern, leaves: Iterator[Any]) -> Any:
    """The value that ``pattern`` describes, with these leaves; after loading, a dataclass becomes a dict."""
    if pattern.name:
        return next(leaves)
    if pattern.kind == "constant":
        return pattern.value
    items = [rebuild(item, leaves) for item in pattern.items]
    if pattern.make is not None:
        return pattern.make(items)
    if pattern.kind in ("dict", "dataclass"):
        return dict(zip(pattern.keys, items, strict=True))
    return items if pattern.kind == "list" else tuple(items)


def is_plain(value: Any) -> bool:
    """Whether it is a constant that a file can have."""
    return value is None or isinstance(value, (bool, int, float, str))


def as_in_file(value: Any) -> Any:
    """A constant as it is loaded: of a built-in type, and not a member of an ``Enum`` or a number of numpy's."""
    return json.loads(json.dumps(value)) if is_plain(value) else value


def is_constant(value: Any, constant: Any) -> bool:
    """Whether a value is this constant, in a file; NaN is itself."""
    value, constant = as_in_file(value), as_in_file(constant)
    return type(value) is type(constant) and (value == constant or (value != value and constant != constant))
