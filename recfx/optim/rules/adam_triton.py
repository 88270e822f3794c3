"""``adam.py`` in Triton. The host subtracts the betas from one: float32 would lose digits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step(
    weight, gradient, first, second, dim,
    learning_rate, eps, first_share, second_beta, second_share, second_correction,
):  # fmt: skip
    """The new weights of a row, and its averages.

    ``learning_rate`` is divided by the first average's bias correction, and ``second_correction`` is the square root of
    the second's.
    """
    first = first + (gradient - first) * first_share
    second = second * second_beta + gradient * gradient * second_share
    return weight - learning_rate * first / (tl.sqrt(second) / second_correction + eps), first, second
