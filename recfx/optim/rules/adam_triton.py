"""``adam.py`` in Triton. The host subtracts the betas from one: float32 would lose digits."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step(
    weight, gradient, first_row_ptr, second_row_ptr, dim, columns, mask,
    learning_rate, eps, first_share, second_beta, second_share, second_correction,
):  # fmt: skip
    """The new weights of a row; its averages are updated in place.

    ``learning_rate`` is divided by the first average's bias correction, and ``second_correction`` is the square root of
    the second's.
    """
    first = tl.load(first_row_ptr + columns, mask=mask, other=0.0)
    first = first + (gradient - first) * first_share
    tl.store(first_row_ptr + columns, first, mask=mask)
    second = tl.load(second_row_ptr + columns, mask=mask, other=0.0)
    second = second * second_beta + gradient * gradient * second_share
    tl.store(second_row_ptr + columns, second, mask=mask)
    return weight - learning_rate * first / (tl.sqrt(second) / second_correction + eps)
