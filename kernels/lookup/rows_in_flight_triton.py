"""Rows on their way into the unified buffer, as many at once as ``tiling.lookup_rows`` says.

A kernel asks for all rows of a block of positions before it uses the first, so that the way to memory is waited for
once in a block and not once in a row. Each is a vector of its own. Which one a position needs is known when the kernel
runs only: it is chosen by halving the block, which compares scalars and moves nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.build.overlap_triton import prefix_at, side_by_side


@triton.jit
def row_at(position, end, rows_ptr):
    """The row of a position; from the end on -1, and nothing is read (a mask would not keep Ascend from reading)."""
    row = tl.load(rows_ptr + tl.minimum(position, end - 1))
    return tl.where(position < end, row, -1)


@triton.jit
def values_of(row, table_ptr, dim, columns):
    """The values of a row, and zeros behind them; of -1 zeros, a prefix of no columns is read."""
    return tl.load(table_ptr + row * dim + columns, mask=columns < tl.where(row >= 0, dim, 0), other=0.0)


@triton.jit
def _ask_for_one(position, end, rows_ptr, values_ptr, stride, count, columns):
    row = row_at(position, end, rows_ptr)
    return prefix_at(values_ptr + row * stride, columns, tl.where(row >= 0, count, 0))


@triton.jit
def _ask_for_eight(i, end, rows_ptr, values_ptr, stride, count, columns):
    return (
        _ask_for_one(i, end, rows_ptr, values_ptr, stride, count, columns),
        _ask_for_one(i + 1, end, rows_ptr, values_ptr, stride, count, columns),
        _ask_for_one(i + 2, end, rows_ptr, values_ptr, stride, count, columns),
        _ask_for_one(i + 3, end, rows_ptr, values_ptr, stride, count, columns),
        _ask_for_one(i + 4, end, rows_ptr, values_ptr, stride, count, columns),
        _ask_for_one(i + 5, end, rows_ptr, values_ptr, stride, count, columns),
        _ask_for_one(i + 6, end, rows_ptr, values_ptr, stride, count, columns),
        _ask_for_one(i + 7, end, rows_ptr, values_ptr, stride, count, columns),
    )  # fmt: skip


@triton.jit
def ask_for_rows(i, end, rows_ptr, values_ptr, stride, count, columns, ROWS: tl.constexpr):
    """The first ``count`` values of each row of a block; what is behind them is undefined, and so is a row of -1.

    Args:
        i: the first position of the block.
        end: no position from here on is read.
        rows_ptr: the row of each position.
        values_ptr: the first value of row 0.
        stride: from one row to the next.
        count: values of a row.
        columns: from 0 to the width of the vectors.
        ROWS: positions of a block: 8, 16 or 32. The others of the 32 vectors are some of these.
    """
    v0, v1, v2, v3, v4, v5, v6, v7 = _ask_for_eight(i, end, rows_ptr, values_ptr, stride, count, columns)
    v8, v9, v10, v11, v12, v13, v14, v15 = v0, v1, v2, v3, v4, v5, v6, v7
    if ROWS > 8:
        v8, v9, v10, v11, v12, v13, v14, v15 = _ask_for_eight(i + 8, end, rows_ptr, values_ptr, stride, count, columns)
    v16, v17, v18, v19, v20, v21, v22, v23 = v0, v1, v2, v3, v4, v5, v6, v7
    v24, v25, v26, v27, v28, v29, v30, v31 = v8, v9, v10, v11, v12, v13, v14, v15
    if ROWS > 16:
        v16, v17, v18, v19, v20, v21, v22, v23 = _ask_for_eight(
            i + 16, end, rows_ptr, values_ptr, stride, count, columns
        )
        v24, v25, v26, v27, v28, v29, v30, v31 = _ask_for_eight(
            i + 24, end, rows_ptr, values_ptr, stride, count, columns
        )
    return (
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
    )  # fmt: skip


@triton.jit
def _one_of_four(place, v0, v1, v2, v3):
    if place < 2:
        value = v0
        if place == 1:
            value = v1
    else:
        value = v2
        if place == 3:
            value = v3
    return value


@triton.jit
def one_of_eight(place, v0, v1, v2, v3, v4, v5, v6, v7):
    """The vector of a place, from 0 to 7."""
    if place < 4:
        value = _one_of_four(place, v0, v1, v2, v3)
    else:
        value = _one_of_four(place - 4, v4, v5, v6, v7)
    return value


@triton.jit
def _one_of_sixteen(
    place, v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
    ROWS: tl.constexpr,
):  # fmt: skip
    if ROWS > 8:
        if place < 8:
            value = one_of_eight(place, v0, v1, v2, v3, v4, v5, v6, v7)
        else:
            value = one_of_eight(place - 8, v8, v9, v10, v11, v12, v13, v14, v15)
    else:
        value = one_of_eight(place, v0, v1, v2, v3, v4, v5, v6, v7)
    return value


@triton.jit
def one_of(
    place,
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
    v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The vector of a place of the block, of those that ``ask_for_rows`` gave."""
    if ROWS > 16:
        if place < 16:
            value = _one_of_sixteen(
                place, v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15, ROWS
            )  # fmt: skip
        else:
            value = _one_of_sixteen(
                place - 16, v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31, ROWS
            )  # fmt: skip
    else:
        value = _one_of_sixteen(
            place, v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15, ROWS
        )  # fmt: skip
    return value


@triton.jit
def _eight_side_by_side(v0, v1, v2, v3, v4, v5, v6, v7):
    first = side_by_side(side_by_side(v0, v1), side_by_side(v2, v3))
    return side_by_side(first, side_by_side(side_by_side(v4, v5), side_by_side(v6, v7)))


@triton.jit
def rows_side_by_side(
    always,
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
    v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One vector of a block's rows, of those that ``ask_for_rows`` gave; each is of ``WIDTH`` values, 32 bytes or more.

    ``always`` is true, which the compiler must not know. In a branch, it waits for all rows at once; elsewhere, for
    each by itself, for which it has too few flags, so that it stops all units.
    """
    values = tl.zeros((WIDTH * ROWS,), dtype=v0.dtype)
    if always:
        values = _eight_side_by_side(v0, v1, v2, v3, v4, v5, v6, v7)
        if ROWS > 8:
            values = side_by_side(values, _eight_side_by_side(v8, v9, v10, v11, v12, v13, v14, v15))
        if ROWS > 16:
            third = _eight_side_by_side(v16, v17, v18, v19, v20, v21, v22, v23)
            fourth = _eight_side_by_side(v24, v25, v26, v27, v28, v29, v30, v31)
            values = side_by_side(values, side_by_side(third, fourth))
    return values
