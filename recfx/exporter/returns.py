"""What a model returns: taken apart into tensors with names, and put together again after loading."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.errors import ExportError
from recfx.exporter.arguments import Pattern

_PARTS = {"tensor": ("",), "keyed_tensor": ("values",), "kjt": ("values", "lengths"), "jagged": ("values", "lengths")}


def return_pattern(value: Any, name: str = "output") -> Pattern:
    """The pattern of what a model returned.

    Args:
        value: what it returned for the sample.
        name: the name of its first tensor; items add ``.<key>`` to it.

    Raises:
        ExportError: ``unsupported_output``.
    """
    if isinstance(value, LazyAwaitable):
        value = value.wait()
    if isinstance(value, torch.Tensor):
        return Pattern("tensor", name)
    if isinstance(value, KeyedTensor):
        return Pattern("keyed_tensor", name, tuple(value.keys()), value=list(value.length_per_key()))
    if isinstance(value, KeyedJaggedTensor):
        return Pattern("kjt", name, tuple(value.keys()))
    if isinstance(value, JaggedTensor):
        return Pattern("jagged", name)
    if value is None or isinstance(value, (bool, int, float, str)):
        return Pattern("constant", value=value)
    items = _items(value)
    if items is None:
        raise ExportError(
            f"the model returns a {type(value).__name__}.",
            reason="unsupported_output",
            what_to_do="return tensors, KeyedTensors, or dicts, lists, tuples and dataclasses of these.",
        )
    kind, keys = items[0], tuple(items[1])
    parts = tuple(return_pattern(item, f"{name}.{key}") for key, item in items[1].items())
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
        f"{leaf.name}.{part}" if len(_PARTS[leaf.kind]) > 1 else leaf.name
        for leaf in pattern.leaves()
        for part in _PARTS[leaf.kind]
    ]


def expressions(pattern: Pattern, expression: str = "output") -> dict[str, str]:
    """By name of each tensor, the TorchScript expression that takes it out of ``expression``."""
    if pattern.name:
        parts = _PARTS[pattern.kind]
        taken = [f"{expression}.{part}()" if part else expression for part in parts]
        return dict(zip(tensor_names(pattern), taken, strict=True))
    found: dict[str, str] = {}
    for key, item in zip(pattern.keys, pattern.items, strict=True):
        found |= expressions(item, f"{expression}[{key!r}]" if pattern.kind == "dict" else f"{expression}[{key}]")
    return found


def take_apart(pattern: Pattern, value: Any) -> dict[str, Any]:
    """By name, the tensors of a value; of a traced one, too, whose parts are proxies."""
    if pattern.name:
        parts = _PARTS[pattern.kind]
        return dict(zip(tensor_names(pattern), [getattr(value, p)() if p else value for p in parts], strict=True))
    found: dict[str, Any] = {}
    for number, (key, item) in enumerate(zip(pattern.keys, pattern.items, strict=True)):
        if pattern.kind == "dataclass":
            part = getattr(value, key)
        else:
            part = value[key] if pattern.kind == "dict" else value[number]
        found |= take_apart(item, part)
    return found


def is_typed(pattern: Pattern) -> bool:
    """Whether TorchScript has a type for it: its dicts and lists hold one type of thing."""
    kinds = {item.kind for item in pattern.items}
    if pattern.kind == "dataclass" or not all(is_typed(item) for item in pattern.items):
        return False
    return pattern.kind not in ("dict", "list") or (len(kinds) <= 1 and not kinds & {"constant", "dict", "list"})


def put_together(pattern: Pattern, tensors: dict[str, torch.Tensor]) -> Any:
    """The value that a pattern describes; a dataclass becomes a dict of its fields."""
    if pattern.name:
        found = [tensors[name] for name in tensor_names(pattern)]
        if pattern.kind == "keyed_tensor":
            return KeyedTensor(list(pattern.keys), list(pattern.value), found[0])
        if pattern.kind == "kjt":
            return KeyedJaggedTensor(list(pattern.keys), found[0], lengths=found[1])
        return JaggedTensor(found[0], lengths=found[1]) if pattern.kind == "jagged" else found[0]
    if pattern.kind == "constant":
        return pattern.value
    items = [put_together(item, tensors) for item in pattern.items]
    if pattern.kind in ("dict", "dataclass"):
        return dict(zip(pattern.keys, items, strict=True))
    return items if pattern.kind == "list" else tuple(items)
