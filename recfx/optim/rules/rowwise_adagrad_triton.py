"""``rowwise_adagrad.py`` in Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step(
    weight, gradient, first, second, dim,
    learning_rate, eps, first_share, second_beta, second_share, second_correction,
):  # fmt: skip
    """The new weights of a row, and its sum ``[1]``. The gradient is zero in the columns that the row does not have."""
    total = first + tl.sum(gradient * gradient, axis=0, keep_dims=True) / dim
    return weight - learning_rate * gradient / (tl.sqrt(total) + eps), total, second
