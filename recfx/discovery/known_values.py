"""What is known of a value in a traced graph: integer tensors, batches of ids, and objects that hold such.

What a ``state_dict`` may replace has no known range.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._sympy.value_ranges import ValueRanges
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

INT32 = ValueRanges(-(2**31), 2**31 - 1)
INT64 = ValueRanges(-(2**63), 2**63 - 1)
Range = Any  # a ValueRanges of integers; torch's own class is not typed for that


@dataclass(frozen=True)
class Ids:
    """An integer tensor: the range of its values, what made them so, and whether its type is known to be int64;
    otherwise it may be int32. A number is int64, because it takes the type of the tensor that it meets.
    """

    range: Range
    why: tuple[str, ...] = ()
    is_int64: bool = False


@dataclass(frozen=True)
class Features:
    """A ``KeyedJaggedTensor``: its ids by key; under None those of all keys that are not named."""

    by_key: Mapping[str | None, Ids]

    def of(self, key: str) -> Ids | None:
        return self.by_key.get(key, self.by_key.get(None))


@dataclass(frozen=True)
class Object:
    """Anything else that the model was called with."""

    value: Any


KNOWN = (Ids, Features, Object)
UNKNOWN = Object(None)


def within(inner: Range, outer: Range) -> bool:
    """Whether the inner range is part of the outer one."""
    return bool(outer.lower <= inner.lower and inner.upper <= outer.upper)


def fits(range: Range, is_int64: bool) -> bool:
    """Whether results in this range fit into their type; otherwise, they may wrap around."""
    return within(range, INT64 if is_int64 else INT32)


def ids_of(value: Any) -> Ids | None:
    """What is known of an operand, which may be a number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Ids(ValueRanges.wrap(value), (), True)
    return value if isinstance(value, Ids) else None


def cast(given: Any, dtype: torch.dtype) -> Any:
    """What is known of a value after a cast to ``dtype``."""
    if not isinstance(given, Ids):
        return None
    if dtype == torch.int64:
        return replace(given, is_int64=True)
    if dtype == torch.int32:
        return replace(given, is_int64=False) if fits(given.range, False) else Ids(INT32, ("int32",), False)
    return None


def of_input(value: Any) -> Any:
    """What is known of an input: its types alone."""
    if isinstance(value, KeyedJaggedTensor):
        return Features({None: Ids(INT64)}) if _is_integer(value.values()) else None
    if isinstance(value, JaggedTensor):
        value = value.values()
    if isinstance(value, torch.Tensor):
        return Ids(INT64) if _is_integer(value) else None
    return Object(value)


def _is_integer(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int64, torch.int32)


def attribute(root: nn.Module, node: Any) -> torch.Tensor | None:
    """The tensor that a ``get_attr`` node reads."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = _attribute_at(root, str(node.target))
    return value if isinstance(value, torch.Tensor) else None


def _attribute_at(root: Any, path: str) -> Any:
    return functools.reduce(lambda holder, name: getattr(holder, name, None), path.split("."), root)


def of_attribute(root: nn.Module, node: fx.Node) -> Ids | None:
    """What is known of a tensor of the model: its values, unless a ``state_dict`` may replace them."""
    tensor = attribute(root, node)
    if tensor is None or not _is_integer(tensor):
        return None
    if tensor.is_meta or not tensor.numel() or _is_in_state_dict(root, str(node.target)):
        return Ids(INT64, (), tensor.dtype == torch.int64)
    lower, upper = (int(bound) for bound in torch.aminmax(tensor))
    return Ids(ValueRanges(lower, upper), (f"values of {node.target}",), tensor.dtype == torch.int64)


def _is_in_state_dict(root: nn.Module, path: str) -> bool:
    holder, _, name = path.rpartition(".")
    module = _attribute_at(root, holder) if holder else root
    if not isinstance(module, nn.Module):
        return False
    return name in module._parameters or name in module._buffers.keys() - module._non_persistent_buffers_set
