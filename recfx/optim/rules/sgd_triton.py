"""``sgd.py`` in Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401, the interpreter looks for it


@triton.jit
def step(
    weight, gradient, first, second, dim,
    learning_rate, eps, first_share, second_beta, second_share, second_correction,
):  # fmt: skip
    """The new weights of a row, and its states: it has none."""
    return weight - learning_rate * gradient, first, second
