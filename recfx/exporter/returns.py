"""What a model returns: taken apart into tensors with names, and put together again after loading."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import torch
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.errors import ExportError, type_of
from recfx.exporter.arguments import Pattern, is_constant, is_plain

_WHAT_TO_DO = "return tensors, KeyedTensors, or dicts, lists, tuples and dataclasses of these."


def return_pattern(value: Any) -> Pattern:
    """The pattern of what a model returned: its first tensor is ``output``, and items add ``.<key>`` to a name.

    Args:
        value: what it returned for the sample.

    Raises:
        ExportError: ``unsupported_output``: something in it has no type in a file, two tensors would have one name, or
            there is no tensor in it.
    """
    pattern = _pattern(value, "output")
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

    Raises:
        ExportError: ``unsupported_output``.
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
    return replace(pattern, items=(), value=None if pattern.kind == "constant" else pattern.value)


def _pattern(value: Any, name: str) -> Pattern:
    if isinstance(value, LazyAwaitable):
        value = value.wait()
    if isinstance(value, torch.Tensor):
        return Pattern("tensor", name)
    if isinstance(value, KeyedTensor):
        return Pattern("keyed_tensor", name, tuple(value.keys()), value=list(value.length_per_key()))
    if isinstance(value, KeyedJaggedTensor):
        return Pattern("kjt", name, tuple(value.keys()), is_weighted=value.weights_or_none() is not None)
    if isinstance(value, JaggedTensor):
        return Pattern("jagged", name, is_weighted=value.weights_or_none() is not None)
    if is_plain(value):
        return Pattern("constant", value=value)
    items = _items(value)
    if items is None:
        raise _unsupported(f"the model returns {type_of(value)}.")
    kind, keys = items[0], tuple(items[1])
    parts = tuple(_pattern(item, f"{name}.{key}") for key, item in items[1].items())
    return Pattern(kind, "", keys, parts, type_name=type(value).__name__)


def _items(value: Any) -> tuple[str, dict[str, Any]] | None:
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return "dict", value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "tuple", {str(number): item for number, item in enumerate(value)}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, {str(number): item for number, item in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclass", {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


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
    """The tensors of a value by name; the value may be traced, with proxies as its parts."""
    if pattern.name:
        taken = [getattr(value, part)() if part else value for part in pattern.parts]
        return dict(zip(tensor_names(pattern), taken, strict=True))
    tensors: dict[str, Any] = {}
    for number, (key, item) in enumerate(zip(pattern.keys, pattern.items, strict=True)):
        if pattern.kind == "dataclass":
            part = getattr(value, key)
        else:
            part = value[key] if pattern.kind == "dict" else value[number]
        tensors |= take_apart(item, part)
    return tensors


def is_typed(pattern: Pattern) -> bool:
    """Whether TorchScript has a type for it: its dicts and lists hold one type of thing."""
    kinds = {item.kind for item in pattern.items}
    if pattern.kind == "dataclass" or not all(is_typed(item) for item in pattern.items):
        return False
    return pattern.kind not in ("dict", "list") or (len(kinds) <= 1 and not kinds & {"constant", "dict", "list"})


def put_together(pattern: Pattern, tensors: dict[str, torch.Tensor]) -> Any:
    """The value that a pattern describes; a dataclass becomes a dict of its fields."""
    if pattern.name:
        parts = [tensors[name] for name in tensor_names(pattern)]
        weights = parts[-1] if pattern.is_weighted else None
        if pattern.kind == "keyed_tensor":
            return KeyedTensor(list(pattern.keys), list(pattern.value), parts[0])
        if pattern.kind == "kjt":
            return KeyedJaggedTensor(list(pattern.keys), parts[0], weights, lengths=parts[1])
        return JaggedTensor(parts[0], weights, parts[1]) if pattern.kind == "jagged" else parts[0]
    if pattern.kind == "constant":
        return pattern.value
    items = [put_together(item, tensors) for item in pattern.items]
    if pattern.kind in ("dict", "dataclass"):
        return dict(zip(pattern.keys, items, strict=True))
    return items if pattern.kind == "list" else tuple(items)
