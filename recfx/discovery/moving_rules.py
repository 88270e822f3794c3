"""Rules for operators that compute nothing: they join, select, reshape or cast ids, or take batches of them apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._sympy.value_ranges import ValueRanges

from recfx.discovery.call_arguments import Values, first_of, operands
from recfx.discovery.known_values import Features, Ids, Object, cast, of_input


def either(values: Values, node: fx.Node) -> Ids | None:
    """``cat`` and ``stack`` of tensors, ``where`` of two."""
    is_where = node.target is torch.where
    if is_where and (len(node.args) != 3 or node.kwargs):
        return None
    parts = node.args[1:] if is_where else node.args[0] if node.args else ()
    found = [values.of(each) for each in parts] if isinstance(parts, (tuple, list)) else []
    if not found or not all(isinstance(each, Ids) for each in found):
        return None
    lower, upper = min(each.range.lower for each in found), max(each.range.upper for each in found)
    why = dict.fromkeys(" then ".join(each.why) for each in found if each.why)
    is_int64 = all(each.is_int64 for each in found)
    return Ids(ValueRanges(lower, upper), (" or ".join(why),) if why else (), is_int64)


def look_up(values: Values, node: fx.Node) -> Any:
    """``x[...]``, or a row of an integer table, or the ids of one key."""
    given = values.of(first_of(node))
    if isinstance(given, Features):
        return given.of(node.args[1]) if isinstance(node.args[1], str) else None
    return given if isinstance(given, Ids) else None


def embedding(values: Values, node: fx.Node) -> Any:
    """``nn.functional.embedding`` in a table of ids."""
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = operands(node, names)
    return None if given is None or given[3] is not None else values.of(given[1])


def same(values: Values, node: fx.Node) -> Any:
    """Other shapes, other places, other orders of the same ids."""
    reinterprets = any(isinstance(each, torch.dtype) for each in (*node.args, *node.kwargs.values()))
    return None if reinterprets else values.of(first_of(node))


def attribute_of(values: Values, node: fx.Node) -> Any:
    """A field of an object that the model was called with."""
    given = values.of(first_of(node))
    fields = getattr(given.value, "__dict__", {}) if isinstance(given, Object) else {}
    return of_input(fields.get(node.args[1]))


def to(values: Values, node: fx.Node) -> Any:
    """``to``: another type, or another device."""
    wanted = [each for each in (*node.args[1:], *node.kwargs.values()) if isinstance(each, torch.dtype)]
    given = values.of(first_of(node))
    if any(isinstance(each, fx.Node) for each in (*node.args[1:], *node.kwargs.values())):
        return None  # the type of another tensor
    return cast(given, wanted[0]) if wanted else given


def to_int64(values: Values, node: fx.Node) -> Any:
    """``long``."""
    return cast(values.of(first_of(node)), torch.int64)


def to_int32(values: Values, node: fx.Node) -> Any:
    """``int``."""
    return cast(values.of(first_of(node)), torch.int32)


def all_values(values: Values, node: fx.Node) -> Ids | None:
    """``values`` of a batch of ids."""
    given = values.of(first_of(node))
    if isinstance(given, Ids):  # of a JaggedTensor
        return given
    if not isinstance(given, Features):
        return None
    parts = list(given.by_key.values())
    lower, upper = min(each.range.lower for each in parts), max(each.range.upper for each in parts)
    why = dict.fromkeys(" then ".join(each.why) for each in parts if each.why)
    return Ids(ValueRanges(lower, upper), (" or ".join(why),) if why else (), all(each.is_int64 for each in parts))


def make_features(values: Values, node: fx.Node) -> Features | None:
    """A ``KeyedJaggedTensor`` that the model makes."""
    keys = node.args[0] if node.args else node.kwargs.get("keys")
    ids = values.of(node.args[1] if len(node.args) > 1 else node.kwargs.get("values"))
    if not isinstance(ids, Ids):
        return None
    if isinstance(keys, (list, tuple)) and all(isinstance(key, str) for key in keys):
        return Features({str(key): ids for key in keys})
    return Features({None: ids})


def make_jagged(values: Values, node: fx.Node) -> Any:
    """A ``JaggedTensor`` that the model makes."""
    return values.of(node.args[0] if node.args else node.kwargs.get("values"))
