"""What a model returns: taken apart into tensors with names, and put together again after loading."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.types
from torch import fx
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.errors import ExportError, type_of
from recfx.exporter.patterns import Pattern, as_in_file, is_constant, pattern_of, rebuild

_WHAT_TO_DO = (
    "return tensors, KeyedTensors, or dicts, lists, tuples and dataclasses of these. Offsets have to start at 0 and \
end with the number of values, and the columns of a KeyedTensor have to be its second dimension."
)


def return_pattern(value: Any) -> Pattern:
    """The pattern of what a model returned: its first tensor is ``output``, and items add ``.<key>`` to a name.

    Args:
        value: what it returned for the sample.
    """
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
    """Refuse a model whose answer to another batch differs in more than the content of tensors.

    A file would return what the sample's answer had.
    """
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
    return replace(pattern, items=(), value=pattern.value if is_keyed else None, type_name="")


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


def is_as_exported(pattern: Pattern, expression: str = "output") -> list[str]:
    """TorchScript expressions that are true if the value has the keys, the lengths and the constants of ``pattern``."""
    if pattern.kind == "constant":
        value = as_in_file(pattern.value)
        if value is None:
            return [f"{expression} is None"]
        is_exact = isinstance(value, (bool, int, str)) or math.isfinite(value)
        return [f"{expression} == {value!r}"] if is_exact else []
    keys = [f"{expression}.keys() == {list(pattern.keys)!r}"] if pattern.kind in ("kjt", "keyed_tensor") else []
    if pattern.kind == "keyed_tensor":
        keys.append(f"{expression}.length_per_key() == {list(pattern.value)!r}")
    elif pattern.kind in ("kjt", "jagged") and not pattern.is_weighted:
        keys.append(f"{expression}.weights_or_none() is None")
    conditions = keys + [f"len({expression}) == {len(pattern.keys)}"] * (pattern.kind in ("list", "dict"))
    if not pattern.name:
        for key, item in zip(pattern.keys, pattern.items, strict=True):
            conditions += is_as_exported(
                item, f"{expression}[{key!r}]" if pattern.kind == "dict" else f"{expression}[{key}]"
            )
    return conditions


def take_apart(pattern: Pattern, value: Any) -> dict[str, Any]:
    """The tensors of a value by name; the value may be traced, with proxies as its parts.

    Raises:
        ExportError: ``unsupported_output``: a number in it is read from a tensor, and would be built in.
    """
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
    return rebuild(pattern, _values(pattern, tensors))


def _values(pattern: Pattern, tensors: dict[str, torch.Tensor]) -> Iterator[Any]:
    for leaf in pattern.leaves():
        parts = [tensors[name] for name in tensor_names(leaf)]
        weights = parts[-1] if leaf.is_weighted else None
        if leaf.kind == "keyed_tensor":
            yield KeyedTensor(list(leaf.keys), list(leaf.value), parts[0])
        elif leaf.kind == "kjt":
            yield KeyedJaggedTensor(list(leaf.keys), parts[0], weights, lengths=parts[1])
        else:
            yield JaggedTensor(parts[0], weights, parts[1]) if leaf.kind == "jagged" else parts[0]
