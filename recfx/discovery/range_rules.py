"""Which rule says what is known of an operator's result. What no rule is about has no known range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.utils._sympy.value_ranges import SymPyValueRangeAnalysis as Analysis

from recfx.discovery import arithmetic_rules, moving_rules
from recfx.discovery.call_arguments import Values

Rule = Callable[[Values, fx.Node], Any]
RULES: dict[str, Rule] = {
    "remainder": arithmetic_rules.remainder,
    "fmod": arithmetic_rules.fmod,
    **dict.fromkeys(("clamp", "clip", "clamp_min", "clamp_max"), arithmetic_rules.clamp),
    "add": arithmetic_rules.arithmetic(Analysis.add, "+"),
    "sub": arithmetic_rules.arithmetic(arithmetic_rules.subtract, "-"),
    "mul": arithmetic_rules.arithmetic(Analysis.mul, "*"),
    "floor_divide": arithmetic_rules.floor_divide,
    "bitwise_and": arithmetic_rules.bitwise_and,
    "abs": arithmetic_rules.absolute,
    **dict.fromkeys(("cat", "stack", "where"), moving_rules.either),
    "minimum": arithmetic_rules.extreme(Analysis.minimum, "minimum"),
    "maximum": arithmetic_rules.extreme(Analysis.maximum, "maximum"),
    **dict.fromkeys(("bucketize", "searchsorted"), arithmetic_rules.bucketize),
    "getitem": moving_rules.look_up,
    "embedding": moving_rules.embedding,
    "getattr": moving_rules.attribute_of,
    **dict.fromkeys(
        (
            "view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "detach", "clone", "permute", "t",
            "transpose", "expand", "repeat", "index_select", "cpu", "cuda", "sync",
        ),
        moving_rules.same,
    ),
    "to": moving_rules.to,
    "long": moving_rules.to_int64,
    "int": moving_rules.to_int32,
    "values": moving_rules.all_values,
    "KeyedJaggedTensor": moving_rules.make_features,
    "JaggedTensor": moving_rules.make_jagged,
}  # fmt: skip

VIEWS = {name for name, rule in RULES.items() if rule is moving_rules.same} | {
    "to", "long", "int", "values", "getitem", "getattr",
}  # fmt: skip
"""The rules of what may give back the memory that it was given."""
