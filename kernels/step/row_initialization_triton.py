"""``row_initialization.py`` in Triton: the new rows of all tables of one dtype in one launch.

A program takes whole rows, no two of which are the same. The hash of an id is a scalar, that of its columns a vector of
int32 (``mix64_triton.py``).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.index.mix64_triton import mix64, mixed_top_bits

# What `tables` holds of each table: `TableFacts`, in this order.
WEIGHT_START: tl.constexpr = tl.constexpr(0)
STRIDE: tl.constexpr = tl.constexpr(1)
DIM: tl.constexpr = tl.constexpr(2)
KEY: tl.constexpr = tl.constexpr(3)
FIRST_COLUMN: tl.constexpr = tl.constexpr(4)
FIRST_START: tl.constexpr = tl.constexpr(5)
FIRST_DIM: tl.constexpr = tl.constexpr(6)
SECOND_START: tl.constexpr = tl.constexpr(7)
SECOND_DIM: tl.constexpr = tl.constexpr(8)
FIELDS: tl.constexpr = tl.constexpr(9)
VALUES: tl.constexpr = tl.constexpr(4)
COLUMNS: tl.constexpr = tl.constexpr(128)
"""How many are written at once; wider rows take several turns."""


@triton.jit
def recfx_initialize_rows(
    entries_ptr,  # int64 [n, 3]: a row, its id, and the number of its table
    tables_ptr,  # int64 [T, FIELDS]
    values_ptr,  # float32 [T, VALUES]: the least weight, the width of the range, what the states begin with
    weights_ptr,  # the first table; the others are reached from it
    first_ptr,  # float32, the first state of the first table that has one
    second_ptr,  # likewise, the second
    num_entries,  # n
):
    """Write the initial weights of new rows, and what their states begin with."""
    columns = tl.arange(0, COLUMNS)
    for entry in range(tl.program_id(0), num_entries, tl.num_programs(0)):
        entry_ptr = entries_ptr + entry * 3
        row = tl.load(entry_ptr)
        table = tl.load(entry_ptr + 2)
        table_ptr = tables_ptr + table * FIELDS
        value_ptr = values_ptr + table * VALUES
        dim = tl.load(table_ptr + DIM)
        row_ptr = weights_ptr + tl.load(table_ptr + WEIGHT_START) + row * tl.load(table_ptr + STRIDE)
        mixed_id = mix64(tl.load(entry_ptr + 1) ^ tl.load(table_ptr + KEY))
        first_column = tl.load(table_ptr + FIRST_COLUMN)
        low = tl.load(value_ptr)
        width = tl.load(value_ptr + 1)
        for begin in range(0, tl.cast(dim, tl.int32), COLUMNS):
            start = mixed_id + (first_column + begin) * -7046029254386353131  # 0x9E3779B97F4A7C15
            share = mixed_top_bits(start, columns + 1).to(tl.float32) * 5.9604644775390625e-08  # 2 ** -24, exact
            weight = (share * width + low).to(weights_ptr.dtype.element_ty)
            tl.store(row_ptr + begin + columns, weight, mask=columns < dim - begin)
        first_dim = tl.load(table_ptr + FIRST_DIM)
        _fill(first_ptr + tl.load(table_ptr + FIRST_START) + row * first_dim, first_dim, tl.load(value_ptr + 2))
        second_dim = tl.load(table_ptr + SECOND_DIM)
        _fill(second_ptr + tl.load(table_ptr + SECOND_START) + row * second_dim, second_dim, tl.load(value_ptr + 3))


@triton.jit
def _fill(row_ptr, dim, value):
    """A row of a state; of no state, which has no columns, nothing."""
    columns = tl.arange(0, COLUMNS)
    values = tl.zeros((COLUMNS,), dtype=tl.float32) + value
    for begin in range(0, tl.cast(dim, tl.int32), COLUMNS):
        tl.store(row_ptr + begin + columns, values, mask=columns < dim - begin)
