"""The gradient of pooled lookups with respect to their per-sample weights, in Triton: a dot product per position."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def recfx_per_sample_weight_gradients(
    rows_ptr,  # int64 [n]
    offsets_ptr,  # int64 [F * B + 1]
    gradients_ptr,  # [B, D], of the pooled output
    first_columns_ptr,  # int32 [F + 1]
    weights_ptr,  # the first table; the others are reached from it
    table_starts_ptr,  # int64 [F], elements from the first table to the feature's
    scale_gradients_ptr,  # float32 [n]
    num_bags,  # F * B
    batch_size,  # B
    num_columns,  # D
    BLOCK_D: tl.constexpr,  # a power of two, at least the largest dim
):
    """For each position, the gradient of its bag times its row; 0 for a row of -1."""
    columns = tl.arange(0, BLOCK_D)
    for bag in range(tl.program_id(0), num_bags, tl.num_programs(0)):
        feature = bag // batch_size
        sample = bag - feature * batch_size
        first_column = tl.load(first_columns_ptr + feature)
        dim = tl.load(first_columns_ptr + feature + 1) - first_column
        bag_ptr = gradients_ptr + sample.to(tl.int64) * num_columns + first_column
        gradient = tl.load(bag_ptr + columns, mask=columns < dim, other=0.0).to(tl.float32)
        table_ptr = weights_ptr + tl.load(table_starts_ptr + feature)
        for position in range(tl.load(offsets_ptr + bag), tl.load(offsets_ptr + bag + 1)):
            row = tl.load(rows_ptr + position)
            present = tl.where(row >= 0, dim, 0)  # a prefix of no columns
            value = tl.load(table_ptr + row * dim + columns, mask=columns < present, other=0.0).to(tl.float32)
            product = tl.sum(gradient * value, axis=0)
            # Without a row, a gradient that is infinite or no number would not give zero.
            tl.store(scale_gradients_ptr + position, tl.where(row >= 0, product, 0.0))
