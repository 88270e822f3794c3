"""``pooled_lookup.py`` in Triton: one source for Ascend, CUDA and Triton's interpreter.

A program takes bags that lie side by side, and walks through their positions in blocks of eight. It asks for all rows
of a block before it adds the first, so that the way to memory is waited for once in a block and not once in a row. A
block does not end where a bag does: bags of few ids cost no more than long ones. Bags are summed in the order of their
ids, whatever the blocks.

Rows, offsets and per-sample weights are read as scalars, a row of a table as one vector under a mask that is a prefix:
the form in which Ascend's compiler reads nothing past the row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_bag_of(program, offsets_ptr, num_bags):
    """The first bag of a program: all have about as much to do, a unit for each position and one for each bag."""
    work = tl.load(offsets_ptr + num_bags) + num_bags
    before = (work + tl.num_programs(0) - 1) // tl.num_programs(0) * program
    low = 0
    high = num_bags
    while low < high:
        middle = low + (high - low) // 2
        if tl.load(offsets_ptr + middle) + middle < before:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def row_at(position, end, rows_ptr):
    """The row of a position; from the end on -1, and nothing is read (a mask would not keep Ascend from reading)."""
    row = tl.load(rows_ptr + tl.minimum(position, end - 1))
    return tl.where(position < end, row, -1)


@triton.jit
def values_of(row, table_ptr, dim, columns):
    """The values of a row; of -1: zeros, a prefix of no columns is read."""
    return tl.load(table_ptr + row * dim + columns, mask=columns < tl.where(row >= 0, dim, 0), other=0.0)


@triton.jit
def _plus(total, values, row, position, begin, end, scales_ptr, WEIGHTED: tl.constexpr):
    """With a row added, if its position lies in the bag from ``begin`` to ``end``."""
    if (begin <= position) & (position < end):
        added = values.to(tl.float32)
        if WEIGHTED:  # zero times an infinite weight, or one that is no number, would not be zero
            added = added * tl.where(row >= 0, tl.load(scales_ptr + position), 0.0)
        total += added
    return total


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
    one = tl.minimum(num_bags, 1).to(tl.float32)
    low = first_bag_of(tl.program_id(0), offsets_ptr, num_bags)
    high = first_bag_of(tl.program_id(0) + 1, offsets_ptr, num_bags)
    bags = tl.maximum(batch_size, 1)
    for feature in range(low // bags, (high - 1) // bags + 1):
        bag = tl.maximum(low, feature * batch_size)
        last = tl.minimum(high, (feature + 1) * batch_size)
        begin = tl.load(offsets_ptr + bag)
        end = tl.load(offsets_ptr + last)
        table_ptr = weights_ptr + tl.load(table_starts_ptr + feature)
        first_column = tl.load(first_columns_ptr + feature)
        dim = tl.load(first_columns_ptr + feature + 1) - first_column
        feature_ptr = pooled_ptr + first_column - tl.cast(feature * batch_size, tl.int64) * num_columns
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for i in range(begin, end, 8):
            row_0, row_1 = row_at(i, end, rows_ptr), row_at(i + 1, end, rows_ptr)
            row_2, row_3 = row_at(i + 2, end, rows_ptr), row_at(i + 3, end, rows_ptr)
            row_4, row_5 = row_at(i + 4, end, rows_ptr), row_at(i + 5, end, rows_ptr)
            row_6, row_7 = row_at(i + 6, end, rows_ptr), row_at(i + 7, end, rows_ptr)
            values_0 = values_of(row_0, table_ptr, dim, columns)
            values_1 = values_of(row_1, table_ptr, dim, columns)
            values_2 = values_of(row_2, table_ptr, dim, columns)
            values_3 = values_of(row_3, table_ptr, dim, columns)
            values_4 = values_of(row_4, table_ptr, dim, columns)
            values_5 = values_of(row_5, table_ptr, dim, columns)
            values_6 = values_of(row_6, table_ptr, dim, columns)
            values_7 = values_of(row_7, table_ptr, dim, columns)
            block_end = tl.minimum(i + 8, end)
            unfinished = bag  # the first bag that does not end in this block
            while (unfinished < last) & (tl.load(offsets_ptr + tl.minimum(unfinished + 1, last)) <= block_end):
                unfinished += 1
            for at in range(bag, tl.minimum(unfinished + 1, last)):
                bag_begin = tl.load(offsets_ptr + at)
                bag_end = tl.load(offsets_ptr + at + 1)
                total = _plus(total, values_0, row_0, i, bag_begin, bag_end, scales_ptr, WEIGHTED)
                total = _plus(total, values_1, row_1, i + 1, bag_begin, bag_end, scales_ptr, WEIGHTED)
                total = _plus(total, values_2, row_2, i + 2, bag_begin, bag_end, scales_ptr, WEIGHTED)
                total = _plus(total, values_3, row_3, i + 3, bag_begin, bag_end, scales_ptr, WEIGHTED)
                total = _plus(total, values_4, row_4, i + 4, bag_begin, bag_end, scales_ptr, WEIGHTED)
                total = _plus(total, values_5, row_5, i + 5, bag_begin, bag_end, scales_ptr, WEIGHTED)
                total = _plus(total, values_6, row_6, i + 6, bag_begin, bag_end, scales_ptr, WEIGHTED)
                total = _plus(total, values_7, row_7, i + 7, bag_begin, bag_end, scales_ptr, WEIGHTED)
                if bag_end <= block_end:
                    if MEAN:
                        pooled = total / tl.maximum(bag_end - bag_begin, 1).to(tl.float32)
                    else:  # a copy: the next bag does not wait until this one is stored
                        pooled = total * one
                    bag_ptr = feature_ptr + tl.cast(at, tl.int64) * num_columns
                    tl.store(bag_ptr + columns, pooled, mask=columns < dim)
                    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
            bag = unfinished
        for empty in range(bag, last):  # without a position
            bag_ptr = feature_ptr + tl.cast(empty, tl.int64) * num_columns
            tl.store(bag_ptr + columns, total, mask=columns < dim)
