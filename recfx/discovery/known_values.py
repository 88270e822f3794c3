"""What is known of a value in a traced graph: integer tensors, batches of ids, and objects that hold such.

What a ``state_dict`` may replace has no known range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._sympy.value_ranges import ValueRanges
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.discovery.shallow_tracer import source_of

INT32 = ValueRanges(-(2**31), 2**31 - 1)
INT64 = ValueRanges(-(2**63), 2**63 - 1)
Range = Any  # a ValueRanges of integers; torch's own class is not typed for that


@dataclass(frozen=True)
class Ids:
    """An integer tensor.

    Args:
        range: of its values.
        why: what made them so.
        is_int64: whether its type is known to be int64; otherwise it may be int32. True for a number, which takes the
            type of the tensor that it meets.
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


def made(before: Ids, after: Range, what: str, node: fx.Node) -> Ids:
    """The value of a rule that narrows or moves a range, with what it did and where."""
    site = source_of(node)
    return replace(before, range=after, why=(*before.why, f"{what} ({site})" if site else what))


def within(inner: Range, outer: Range) -> bool:
    """Whether the inner range is part of the outer one."""
    return bool(outer.lower <= inner.lower and inner.upper <= outer.upper)


def cast(given: Any, dtype: torch.dtype) -> Any:
    """What is known of a value after a cast to ``dtype``."""
    if not isinstance(given, Ids):
        return None
    if dtype == torch.int64:
        return replace(given, is_int64=True)
    if dtype == torch.int32:
        fits = within(given.range, INT32)  # otherwise it wraps around
        return replace(given, is_int64=False) if fits else Ids(INT32, ("int32",), False)
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
    found: Any = root
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, torch.Tensor) else None


def of_attribute(root: nn.Module, path: str) -> Ids | None:
    """What is known of a tensor of the model: its values, unless a ``state_dict`` may replace them."""
    owner, _, name = path.rpartition(".")
    holder: Any = root
    for part in owner.split(".") if owner else ():
        holder = getattr(holder, part, None)
    found = getattr(holder, name, None)
    if not isinstance(found, torch.Tensor) or not _is_integer(found):
        return None
    if found.is_meta or not found.numel() or _is_in_state_dict(holder, name):
        return Ids(INT64, (), found.dtype == torch.int64)
    lower, upper = (int(each) for each in torch.aminmax(found))
    return Ids(ValueRanges(lower, upper), (f"values of {path}",), found.dtype == torch.int64)


def _is_in_state_dict(module: Any, name: str) -> bool:
    if not isinstance(module, nn.Module):
        return False
    return name in module._parameters or name in module._buffers.keys() - module._non_persistent_buffers_set
