"""Expressions as data that a page can evaluate."""

from __future__ import annotations

import pytest
import sympy

from recfx.drawing.costs import formula
from recfx.ir.meta import BATCH, WORLD, mean_length

A, B = mean_length("a"), mean_length("b")


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (sympy.Integer(7), 7),
        (sympy.Rational(3, 8), ["/", 3, 8]),
        (BATCH, "B"),
        (WORLD, "W"),
        (B, ["L", 1]),
        (8 * BATCH, ["*", 8, "B"]),
        (BATCH**2, ["^", "B", 2]),
        (sympy.Min(A, 10, evaluate=False), ["min", 10, ["L", 0]]),
        (sympy.Max(A, 10, evaluate=False), ["max", 10, ["L", 0]]),
        (sympy.sin(A), None),
        (2 * sympy.sin(A) + 1, None),
        (mean_length("c"), None),
    ],
)
def test_formula(expression: sympy.Expr, expected: object) -> None:
    assert formula(expression, {A: 0, B: 1}) == expected
