"""In which range the results of operators are. What no rule is about has no known range.

A rule has the parameters of its operator, takes what is known of its arguments, and says what torch does; None if it
knows nothing. ``%`` and ``remainder`` have the sign of the divisor, ``fmod`` has that of the dividend, and a result
that does not fit into the tensor's type wraps around, so all that is known of it is that it is an integer. That is
enough for a later ``%`` or ``clamp`` to bound it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis as Analysis
from torch.utils._sympy.value_ranges import ValueRanges
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recfx.discovery.known_values import INT64, KNOWN, Features, Ids, Object, Range, cast, fits, ids_of, of_input

Rule = Callable[..., Any]


class Computed(NamedTuple):
    """The result of an operator that computes: the ids it started from, their new range, and what it did to them."""

    before: Ids
    range: Range
    what: str


def _any_integer(*operands: Any) -> Ids | None:
    """Integers, which is what an operator makes of integers; None if an operand may be something else."""
    known = [ids_of(operand) for operand in operands]
    return None if None in known else Ids(INT64, (), all(ids is not None and ids.is_int64 for ids in known))


def _by_number(compute: Callable[[Range, int], Range | None], sign: str) -> Rule:
    """The rule for an operator that bounds its result if the second operand is a number."""

    def rule(input: Any, other: Any) -> Computed | Ids | None:
        if not isinstance(input, Ids) or type(other) is not int:
            return _any_integer(input, other)
        after = compute(input.range, other)
        return _any_integer(input) if after is None else Computed(input, after, f"{sign} {other}")

    return rule


def _remainder(ids: Range, divisor: int) -> Range | None:
    if divisor > 0:
        return Analysis.mod(ids, ValueRanges.wrap(divisor)) if ids.lower >= 0 else ValueRanges(0, divisor - 1)
    return ValueRanges(divisor + 1, 0) if divisor else None


def _fmod(ids: Range, divisor: int) -> Range | None:
    largest = abs(divisor) - 1
    lower = 0 if ids.lower >= 0 else max(-largest, int(ids.lower))
    upper = 0 if ids.upper <= 0 else min(largest, int(ids.upper))
    return ValueRanges(lower, upper) if divisor else None


def _floor_divide(ids: Range, divisor: int) -> Range | None:
    return Analysis.floordiv(ids, ValueRanges.wrap(divisor)) if divisor > 0 else None


def _bitwise_and(ids: Range, mask: int) -> Range | None:
    return None if mask < 0 else ValueRanges(0, mask if ids.lower < 0 else min(mask, int(ids.upper)))


def _clamp(input: Any, min: Any = None, max: Any = None) -> Computed | None:
    if not isinstance(input, Ids) or any(bound is not None and type(bound) is not int for bound in (min, max)):
        return None
    after = input.range if min is None else Analysis.maximum(input.range, ValueRanges.wrap(min))
    after = after if max is None else Analysis.minimum(after, ValueRanges.wrap(max))  # the maximum wins
    words = [f"{word}={bound}" for word, bound in (("min", min), ("max", max)) if bound is not None]
    return Computed(input, after, f"clamp({', '.join(words)})")


def _of_two(compute: Callable[..., Range], what: str, *, may_wrap: bool) -> Rule:
    """The rule for an operator of two operands, whose result may be too large for its type."""

    def rule(input: Any, other: Any) -> Computed | Ids | None:
        left, right = ids_of(input), ids_of(other)
        if left is None or right is None:
            return None
        both = Ids(left.range, left.why + right.why, left.is_int64 and right.is_int64)
        after = compute(left.range, right.range)
        if not may_wrap:
            return Computed(both, after, what)
        operand = other if isinstance(other, int) else "another"
        return Computed(both, after, f"{what} {operand}") if fits(after, both.is_int64) else _any_integer(left, right)

    return rule


def _subtract(left: Range, right: Range) -> Range:
    return ValueRanges(left.lower - right.upper, left.upper - right.lower)


def _absolute(input: Any) -> Computed | Ids | None:
    if not isinstance(input, Ids):
        return None
    after = Analysis.abs(input.range)  # the lowest number there is has itself as abs
    return Computed(input, after, "abs") if fits(after, input.is_int64) else _any_integer(input)


def _bucketize(input: Any, boundaries: Any, **options: Any) -> Computed | None:
    """Places among boundaries that are a tensor of the model."""
    if not isinstance(boundaries, torch.Tensor) or boundaries.dim() != 1:
        return None
    places = boundaries.numel()
    return Computed(Ids(INT64), ValueRanges(0, places), f"{places} boundaries")


def _searchsorted(sorted_sequence: Any, input: Any, **options: Any) -> Computed | None:
    return _bucketize(input, sorted_sequence)


def _any_of(parts: Sequence[Any]) -> Ids | None:
    """Ids that come from any of several tensors."""
    known = [ids for part in parts if (ids := ids_of(part)) is not None]
    if not known or len(known) < len(parts):
        return None
    why = dict.fromkeys(" then ".join(ids.why) for ids in known if ids.why)
    return Ids(
        functools.reduce(operator.or_, (ids.range for ids in known)),
        (" or ".join(why),) if why else (),
        all(ids.is_int64 for ids in known),
    )


def _joined(tensors: Any, dim: Any = 0) -> Ids | None:
    return _any_of(tensors) if isinstance(tensors, (tuple, list)) else None


def _getitem(input: Any, index: Any) -> Ids | None:
    """``x[...]``, or a row of an integer table, or the ids of one key."""
    if isinstance(input, Features):
        return input.of(index) if isinstance(index, str) else None
    return input if isinstance(input, Ids) else None


def _embedding(
    input: Any, weight: Any, padding_idx: Any = None, max_norm: Any = None, *rest: Any, **options: Any
) -> Any:
    """A row of a table of ids, which ``max_norm`` would change."""
    return weight if max_norm is None else None


def _same(input: Any, *rest: Any, **options: Any) -> Any:
    """Other shapes, other places, other orders of the same ids."""
    reinterprets = any(isinstance(value, torch.dtype) for value in (*rest, *options.values()))
    return None if reinterprets else input


def _getattr(value: Any, name: str, *default: Any) -> Any:
    """A field of an object that the model was called with."""
    fields = getattr(value.value, "__dict__", {}) if isinstance(value, Object) else {}
    return of_input(fields.get(name))


def _to(input: Any, *rest: Any, **options: Any) -> Any:
    """Another type, or another device."""
    given = (*rest, *options.values())
    if any(isinstance(value, KNOWN) for value in given):
        return None  # the type of another tensor
    dtypes = [value for value in given if isinstance(value, torch.dtype)]
    return cast(input, dtypes[0]) if dtypes else input


def _values(features: Any) -> Ids | None:
    if isinstance(features, Ids):  # the values of a JaggedTensor
        return features
    return _any_of(list(features.by_key.values())) if isinstance(features, Features) else None


def _make_features(keys: Any, values: Any, *rest: Any, **options: Any) -> Features | None:
    if not isinstance(values, Ids):
        return None
    if isinstance(keys, (list, tuple)) and all(isinstance(key, str) for key in keys):
        return Features({str(key): values for key in keys})
    return Features({None: values})


RULES: dict[str, Rule] = {
    "remainder": _by_number(_remainder, "%"),
    "fmod": _by_number(_fmod, "fmod"),
    "floor_divide": _by_number(_floor_divide, "//"),
    "bitwise_and": _by_number(_bitwise_and, "&"),
    **dict.fromkeys(("clamp", "clip"), _clamp),
    "clamp_min": lambda input, min: _clamp(input, min=min),
    "clamp_max": lambda input, max: _clamp(input, max=max),
    "add": _of_two(Analysis.add, "+", may_wrap=True),
    "sub": _of_two(_subtract, "-", may_wrap=True),
    "mul": _of_two(Analysis.mul, "*", may_wrap=True),
    "minimum": _of_two(Analysis.minimum, "minimum", may_wrap=False),
    "maximum": _of_two(Analysis.maximum, "maximum", may_wrap=False),
    "abs": _absolute,
    **dict.fromkeys(
        ("bitwise_xor", "bitwise_or", "bitwise_left_shift", "bitwise_right_shift"),
        lambda input, other: _any_integer(input, other),
    ),
    **dict.fromkeys(("bitwise_not", "neg"), lambda input: _any_integer(input)),
    "torch.bucketize": _bucketize,
    "torch.searchsorted": _searchsorted,
    **dict.fromkeys(("torch.cat", "torch.stack"), _joined),
    "torch.where": lambda condition, input, other: _any_of([input, other]),
    "getitem": _getitem,
    "embedding": _embedding,
    "getattr": _getattr,
    **dict.fromkeys(
        (
            "view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "detach", "clone", "permute", "t",
            "transpose", "expand", "repeat", "index_select", "cpu", "cuda", "sync",
        ),
        _same,
    ),
    "to": _to,
    "long": lambda input, **options: cast(input, torch.int64),
    "int": lambda input, **options: cast(input, torch.int32),
    "values": _values,
    "KeyedJaggedTensor": _make_features,
    "JaggedTensor": lambda values, *rest, **options: values,
}  # fmt: skip
"""By name of the method of tensors and batches, or of the function."""

TAKES_TENSORS = (_bucketize, _searchsorted)
"""Rules that take tensors of the model themselves."""

VIEWS = {name for name, rule in RULES.items() if rule is _same} | {"to", "long", "int", "values", "getitem", "getattr"}
"""The rules of what may give back the memory that it was given."""

FUNCTIONS: dict[Any, str] = {
    operator.mod: "remainder",
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.floordiv: "floor_divide",
    operator.and_: "bitwise_and",
    operator.xor: "bitwise_xor",
    operator.or_: "bitwise_or",
    operator.lshift: "bitwise_left_shift",
    operator.rshift: "bitwise_right_shift",
    operator.invert: "bitwise_not",
    operator.neg: "neg",
    operator.getitem: "getitem",
    getattr: "getattr",
    nn.functional.embedding: "embedding",
    KeyedJaggedTensor: "KeyedJaggedTensor",
    JaggedTensor: "JaggedTensor",
    torch.concat: "torch.cat",
    torch.clip: "clamp",
    **{getattr(torch, name): f"torch.{name}" for name in ("cat", "stack", "where", "bucketize", "searchsorted")},
    **{
        getattr(torch, name): name
        for name in (
            "remainder", "fmod", "clamp", "clamp_min", "clamp_max", "add", "sub", "mul", "floor_divide", "bitwise_and",
            "bitwise_xor", "bitwise_or", "bitwise_left_shift", "bitwise_right_shift", "bitwise_not", "neg",
            "abs", "minimum", "maximum", "flatten", "reshape", "squeeze", "unsqueeze",
        )
    },
}  # fmt: skip


def name_of(node: fx.Node) -> str:
    """The name of the rule for a call, if there is one."""
    return str(node.target) if node.op == "call_method" else FUNCTIONS.get(node.target, "")
