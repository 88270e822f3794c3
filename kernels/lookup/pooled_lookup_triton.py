"""``pooled_lookup.py`` in Triton: one source for Ascend, CUDA and Triton's interpreter.

A program takes whole bags. Rows, offsets and per-sample weights are read as scalars, a row of a table as one vector
under a mask that is a prefix: the form in which Ascend's compiler reads nothing past the row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def recfx_pooled_lookup(
    rows_ptr,  # int64 [n]
    offsets_ptr,  # int64 [F * B + 1]
    scales_ptr,  # float32 [n], read if WEIGHTED
    weights_ptr,  # the first table; the others are reached from it
    table_starts_ptr,  # int64 [F], elements from the first table to the feature's
    first_columns_ptr,  # int32 [F + 1], the columns of the output that the features fill
    pooled_ptr,  # float32 [B, D]
    num_bags,  # F * B
    batch_size,  # B
    num_columns,  # D
    BLOCK_D: tl.constexpr,  # a power of two, at least the largest dim
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
):
    """``pooled_lookup``: any number of tables of any dims up to ``BLOCK_D`` in one launch."""
    columns = tl.arange(0, BLOCK_D)
    for bag in range(tl.program_id(0), num_bags, tl.num_programs(0)):
        feature = bag // batch_size
        sample = bag - feature * batch_size
        table_ptr = weights_ptr + tl.load(table_starts_ptr + feature)
        first_column = tl.load(first_columns_ptr + feature)
        dim = tl.load(first_columns_ptr + feature + 1) - first_column
        begin = tl.load(offsets_ptr + bag)
        end = tl.load(offsets_ptr + bag + 1)
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for position in range(begin, end):
            row = tl.load(rows_ptr + position)
            present = tl.where(row >= 0, dim, 0)  # a row of -1 adds nothing: a prefix of no columns
            value = tl.load(table_ptr + row * dim + columns, mask=columns < present, other=0.0).to(tl.float32)
            if WEIGHTED:  # zero times an infinite weight, or one that is no number, would not be zero
                value = value * tl.where(row >= 0, tl.load(scales_ptr + position), 0.0)
            total += value
        if MEAN:
            total = total / tl.maximum(end - begin, 1).to(tl.float32)
        bag_ptr = pooled_ptr + sample.to(tl.int64) * num_columns + first_column
        tl.store(bag_ptr + columns, total, mask=columns < dim)
