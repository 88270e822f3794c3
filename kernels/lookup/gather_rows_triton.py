"""``pooled_lookup.py`` without pooling, in Triton: copies the rows of a batch.

A program takes positions that lie side by side, feature by feature, and walks through them in blocks of eight. It asks
for all rows of a block before it writes the first, so that the way to memory is waited for once in a block. The rows of
a block are written through a pointer each, for Ascend's compiler would have writing a row wait until the row before it
is written.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.lookup.rows_in_flight_triton import row_at, values_of


@triton.jit
def _put(values, position, end, gathered_ptr, dim, columns):
    """Write a row of the output; from ``end`` on nothing, a prefix of no columns."""
    to_ptr = gathered_ptr + tl.cast(position, tl.int64) * dim
    tl.store(to_ptr + columns, values.to(tl.float32), mask=columns < tl.where(position < end, dim, 0))


@triton.jit
def recfx_gather_rows(
    rows_ptr,  # int64 [n]
    borders_ptr,  # int64 [F + 1], where the positions of each feature begin
    weights_ptr,  # the first table; the others are reached from it
    table_starts_ptr,  # int64 [F], elements from the first table to the feature's
    gathered_ptr,  # float32 [n, dim]
    gathered_1_ptr,  # the same memory; likewise below
    gathered_2_ptr,
    gathered_3_ptr,
    gathered_4_ptr,
    gathered_5_ptr,
    gathered_6_ptr,
    gathered_7_ptr,
    num_positions,  # n
    num_features,  # F
    dim,  # of all tables
    BLOCK_D: tl.constexpr,  # a power of two, at least dim
):
    """``pooled_lookup`` without pooling: any number of tables in one launch; zeros for rows of -1."""
    columns = tl.arange(0, BLOCK_D)
    chunk = (num_positions + tl.num_programs(0) - 1) // tl.num_programs(0)
    low = tl.program_id(0) * chunk
    high = tl.minimum(low + chunk, num_positions)
    for feature in range(0, num_features):
        begin = tl.maximum(low, tl.load(borders_ptr + feature))
        end = tl.minimum(high, tl.load(borders_ptr + feature + 1))
        table_ptr = weights_ptr + tl.load(table_starts_ptr + feature)
        for i in range(begin, end, 8):
            values_0 = values_of(row_at(i, end, rows_ptr), table_ptr, dim, columns)
            values_1 = values_of(row_at(i + 1, end, rows_ptr), table_ptr, dim, columns)
            values_2 = values_of(row_at(i + 2, end, rows_ptr), table_ptr, dim, columns)
            values_3 = values_of(row_at(i + 3, end, rows_ptr), table_ptr, dim, columns)
            values_4 = values_of(row_at(i + 4, end, rows_ptr), table_ptr, dim, columns)
            values_5 = values_of(row_at(i + 5, end, rows_ptr), table_ptr, dim, columns)
            values_6 = values_of(row_at(i + 6, end, rows_ptr), table_ptr, dim, columns)
            values_7 = values_of(row_at(i + 7, end, rows_ptr), table_ptr, dim, columns)
            _put(values_0, i, end, gathered_ptr, dim, columns)
            _put(values_1, i + 1, end, gathered_1_ptr, dim, columns)
            _put(values_2, i + 2, end, gathered_2_ptr, dim, columns)
            _put(values_3, i + 3, end, gathered_3_ptr, dim, columns)
            _put(values_4, i + 4, end, gathered_4_ptr, dim, columns)
            _put(values_5, i + 5, end, gathered_5_ptr, dim, columns)
            _put(values_6, i + 6, end, gathered_6_ptr, dim, columns)
            _put(values_7, i + 7, end, gathered_7_ptr, dim, columns)
