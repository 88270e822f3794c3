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
import torch.types
from tensordict import TensorDict
from torch import fx
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.errors import ExportError, type_of
from recfx.models.nests import nest_of


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
    """What one argument, or what is returned, looks like, or a part of it.

    ``name`` is that of a leaf in the program; ``items`` are the patterns inside of a dict, list, tuple or dataclass,
    and ``keys`` their keys, fields or numbers (older files lack numbers of arguments), the features of a KJT, or the
    keys of a keyed tensor. ``value`` is that of a constant, which the program has built in; of a tensor, the sample's
    number of dimensions, and whether it is of floats; of a keyed tensor, the columns of each key. ``type_name`` is that
    of a tensor's dtype, or of the class of a dataclass or of a dict that is an argument (older files lack those of
    dtypes and dicts). ``make`` makes a nest of its items, and is None after loading.
    """

    kind: str  # "tensor", "kjt", "constant", "dict", "list", "tuple", "dataclass"; also "jagged", "keyed_tensor"
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

    def leaf_of(self, tensors: Iterator[Any]) -> Any:
        """The leaf that its next tensors make; the lengths of a KJT may be ``[F, B]``."""
        values, *others = [next(tensors) for _ in self.parts]
        weights = others[1] if self.is_weighted else None
        if self.kind == "keyed_tensor":
            return KeyedTensor(list(self.keys), list(self.value), values)
        if self.kind == "jagged":
            return JaggedTensor(values, weights, others[0])
        if self.kind == "kjt":
            stride = others[0].size(1) if others[0].dim() == 2 else None
            return KeyedJaggedTensor(list(self.keys), values, weights, lengths=others[0].reshape(-1), stride=stride)
        return values

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


_WHAT_TO_DO = (
    "return tensors, KeyedTensors, or dicts, lists, tuples and dataclasses of these. Offsets have to start at 0 and \
end with the number of values, and the columns of a KeyedTensor have to be its second dimension."
)


def return_pattern(value: Any) -> Pattern:
    """The pattern of what a model returned for the sample: ``output``, to which items add ``.<key>``."""
    pattern = pattern_of(value, "output", lambda _, part: _unsupported(f"the model returns {type_of(part)}."))
    names = tensor_names(pattern)
    if not names:
        raise _unsupported("the model returns no tensor.")
    for name in names:
        if names.count(name) > 1:
            raise _unsupported(f"two tensors that the model returns would be {name!r} in the file.", "rename a key.")
    return pattern


def _unsupported(message: str, what_to_do: str = _WHAT_TO_DO) -> ExportError:
    return ExportError(message, reason="unsupported_output", what_to_do=what_to_do)


def check_alike(expected: Pattern, answer: Pattern, batch: str, where: str = "output") -> None:
    """Refuse a model whose answer to another batch differs in more than the content of tensors, as no file's would."""
    if expected.kind == answer.kind == "constant" and not is_constant(expected.value, answer.value):
        values = f"{expected.value!r} for the sample, and {answer.value!r} for {batch}"
        raise _unsupported(
            f"{where} of the model is {values}: what is not a tensor would be built in.", "return a tensor there."
        )
    if _alone(expected) != _alone(answer):
        raise _unsupported(f"the model returns something else in {where} for {batch} than for the sample.")
    # The keys of a KJT have no items.
    for key, expected_item, item in zip(expected.keys, expected.items, answer.items, strict=False):
        check_alike(expected_item, item, batch, f"{where}.{key}")


def _alone(pattern: Pattern) -> Pattern:
    is_keyed = pattern.kind == "keyed_tensor"
    return dataclasses.replace(pattern, items=(), value=pattern.value if is_keyed else None, type_name="")


def tensor_names(pattern: Pattern) -> list[str]:
    """The names of its tensors, in order."""
    return [
        f"{leaf.name}.{part}" if leaf.kind in ("kjt", "jagged") else leaf.name
        for leaf in pattern.leaves()
        for part in leaf.parts
    ]


def expressions(pattern: Pattern, expression: str = "output") -> dict[str, str]:
    """The TorchScript expressions that take the tensors out of ``expression``, by the tensors' names."""
    if pattern.name:
        calls = [f"{expression}.{part}()" if part else expression for part in pattern.parts]
        return dict(zip(tensor_names(pattern), calls, strict=True))
    taken: dict[str, str] = {}
    for key, item in zip(pattern.keys, pattern.items, strict=True):
        taken |= expressions(item, f"{expression}[{key!r}]" if pattern.kind == "dict" else f"{expression}[{key}]")
    return taken


def take_apart(pattern: Pattern, value: Any) -> dict[str, Any]:
    """The tensors of a value by name; it may be traced, with proxies as its parts, but not with one as a constant."""
    if pattern.kind == "constant" and issubclass(type(value), (fx.Proxy, *torch.types.py_sym_types)):
        raise _unsupported("the model returns a number that it reads from a tensor.", "return a tensor there.")
    if pattern.name:
        taken = [getattr(value, part)() if part else value for part in pattern.parts]
        return dict(zip(tensor_names(pattern), taken, strict=True))
    tensors: dict[str, Any] = {}
    for _, item, part in pattern.children(value):
        tensors |= take_apart(item, part)
    return tensors


def is_typed(pattern: Pattern) -> bool:
    """Whether TorchScript has a type for it: its dicts and lists hold one type of thing."""
    kinds = {item.kind for item in pattern.items}
    if pattern.kind == "dataclass" or not all(is_typed(item) for item in pattern.items):
        return False
    return pattern.kind not in ("dict", "list") or (len(kinds) <= 1 and not kinds & {"constant", "dict", "list"})


def put_together(pattern: Pattern, tensors: dict[str, torch.Tensor]) -> Any:
    """The value that a loaded pattern describes; a dataclass becomes a dict of its fields."""
    named = iter([tensors[name] for name in tensor_names(pattern)])
    return rebuild(pattern, (leaf.leaf_of(named) for leaf in pattern.leaves()))
