"""Rules for operators that compute: in which range their results are. Each says what torch does.

``%`` and ``remainder`` have the sign of the divisor, ``fmod`` has that of the dividend, and a result that does not fit
into the tensor's type wraps around, so nothing is known of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx
from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis as Analysis
from torch.utils._sympy.value_ranges import ValueRanges

from recfx.discovery.call_arguments import Values, first_of, ids_and_constant, operands
from recfx.discovery.known_values import INT32, INT64, Ids, Range, attribute, made, within
from recfx.discovery.operator_names import name_of


def remainder(values: Values, node: fx.Node) -> Ids | None:
    """``%`` by a number."""
    found = ids_and_constant(values, node)
    if found is None or found[1] == 0:
        return None
    ids, divisor = found
    positive = divisor > 0
    after = Analysis.python_mod(ids.range, ValueRanges.wrap(divisor)) if positive else ValueRanges(divisor + 1, 0)
    return made(ids, after, f"% {divisor}", node)


def fmod(values: Values, node: fx.Node) -> Ids | None:
    """The remainder with the sign of the ids."""
    found = ids_and_constant(values, node)
    if found is None or found[1] == 0:
        return None
    ids, most = found[0], abs(found[1]) - 1
    lower = 0 if ids.range.lower >= 0 else max(-most, int(ids.range.lower))
    upper = 0 if ids.range.upper <= 0 else min(most, int(ids.range.upper))
    return made(ids, ValueRanges(lower, upper), f"fmod {found[1]}", node)


def clamp(values: Values, node: fx.Node) -> Ids | None:
    """``clamp`` and ``clip`` between numbers, on one side or on both."""
    name = name_of(node)
    names = {"clamp_min": ("input", "min"), "clamp_max": ("input", "max")}.get(name, ("input", "min", "max"))
    given = operands(node, names)
    ids = None if given is None else values.of(given[0])
    if given is None or not isinstance(ids, Ids):
        return None
    bounds = dict(zip(names[1:], given[1:], strict=True))
    lowest, highest = bounds.get("min"), bounds.get("max")
    if any(bound is not None and type(bound) is not int for bound in (lowest, highest)):
        return None
    after = ids.range if lowest is None else Analysis.maximum(ids.range, ValueRanges.wrap(lowest))
    after = after if highest is None else Analysis.minimum(after, ValueRanges.wrap(highest))  # the maximum wins
    words = [f"{word}={bound}" for word, bound in (("min", lowest), ("max", highest)) if bound is not None]
    return made(ids, after, f"clamp({', '.join(words)})", node)


def arithmetic(compute: Callable[..., Range], sign: str) -> Callable[[Values, fx.Node], Ids | None]:
    """The rule for an operator of two operands whose result may be too large for its type."""

    def rule(values: Values, node: fx.Node) -> Ids | None:
        given = operands(node, ("input", "other"))
        sides = None if given is None else [values.of(each) for each in given]
        if sides is None or not all(isinstance(each, Ids) for each in sides):
            return None
        left, right = sides
        is_int64 = left.is_int64 and right.is_int64
        after = compute(left.range, right.range)
        if not within(after, INT64 if is_int64 else INT32):
            return None  # it may wrap around
        other = str(given[1]) if given is not None and not isinstance(given[1], fx.Node) else "another"
        return made(replace(left, why=left.why + right.why, is_int64=is_int64), after, f"{sign} {other}", node)

    return rule


def floor_divide(values: Values, node: fx.Node) -> Ids | None:
    """``//`` by a positive number."""
    found = ids_and_constant(values, node)
    if found is None or found[1] <= 0:
        return None
    return made(found[0], Analysis.floordiv(found[0].range, ValueRanges.wrap(found[1])), f"// {found[1]}", node)


def bitwise_and(values: Values, node: fx.Node) -> Ids | None:
    """``&`` with a number that is not negative."""
    found = ids_and_constant(values, node)
    if found is None or found[1] < 0:
        return None
    upper = found[1] if found[0].range.lower < 0 else min(found[1], int(found[0].range.upper))
    return made(found[0], ValueRanges(0, upper), f"& {found[1]}", node)


def absolute(values: Values, node: fx.Node) -> Ids | None:
    """``abs``."""
    ids = values.of(first_of(node))
    if not isinstance(ids, Ids):
        return None
    after = Analysis.abs(ids.range)  # of the lowest number there is, abs is that number itself
    return made(ids, after, "abs", node) if within(after, INT64 if ids.is_int64 else INT32) else None


def extreme(compute: Callable[..., Range], name: str) -> Callable[[Values, fx.Node], Ids | None]:
    """The rule for the smaller or the larger of two tensors."""

    def rule(values: Values, node: fx.Node) -> Ids | None:
        sides = [values.of(each) for each in node.args]
        if len(sides) != 2 or node.kwargs or not all(isinstance(each, Ids) for each in sides):
            return None
        left, right = sides
        both = replace(left, why=left.why + right.why, is_int64=left.is_int64 and right.is_int64)
        return made(both, compute(left.range, right.range), name, node)

    return rule


def bucketize(values: Values, node: fx.Node) -> Ids | None:
    """``bucketize`` and ``searchsorted``: places among boundaries that are a tensor of the model."""
    name, place = ("boundaries", 1) if node.target is torch.bucketize else ("sorted_sequence", 0)
    boundaries = node.args[place] if len(node.args) > place else node.kwargs.get(name)
    tensor = attribute(values.root, boundaries)
    if tensor is None or tensor.dim() != 1:
        return None
    return made(Ids(INT64, (), False), ValueRanges(0, tensor.numel()), f"{tensor.numel()} boundaries", node)


def subtract(left: Range, right: Range) -> Range:
    """The range of a difference."""
    return ValueRanges(left.lower - right.upper, left.upper - right.lower)
