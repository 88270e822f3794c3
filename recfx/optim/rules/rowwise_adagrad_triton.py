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
    """The new weights of a row, and its sum ``[1]``. What lies in columns that the row does not have is left out."""
    columns = tl.arange(0, gradient.shape[0]).to(tl.float32)
    squares = tl.where(columns < dim.to(tl.float32), gradient * gradient, 0.0)
    total = first + tl.sum(squares, axis=0, keep_dims=True) / dim
    return weight - learning_rate * gradient / (tl.sqrt(total) + eps), total, second
