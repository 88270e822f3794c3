"""``rowwise_adagrad.py`` in Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step(
    weight, gradient, first_row_ptr, second_row_ptr, dim, columns, mask,
    learning_rate, eps, first_share, second_beta, second_share, second_correction,
):  # fmt: skip
    """The new weights of a row; its sum is updated in place. The gradient is zero where ``mask`` is not set."""
    total = tl.load(first_row_ptr) + tl.sum(gradient * gradient, axis=0) / dim
    tl.store(first_row_ptr, total)
    return weight - learning_rate * gradient / (tl.sqrt(total) + eps)
