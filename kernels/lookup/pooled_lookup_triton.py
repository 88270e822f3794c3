"""``pooled_lookup.py`` in Triton: one source for Ascend, CUDA and Triton's interpreter.

A program takes bags that lie side by side, and walks through their positions in blocks of ``ROWS``. It asks for all
rows of a block before it adds the first (``rows_in_flight_triton.py``). A block does not end where a bag does: bags of
few ids cost no more than long ones. Bags are summed in the order of their ids, whatever the blocks.

Rows, offsets and per-sample weights are read as scalars, a row of a table as one vector under a mask that is a prefix:
the form in which Ascend's compiler reads nothing past the row.

That compiler has a store wait for the one before through the same pointer. Bags are stored through two pointers in
turn, and in front of each two is a store of nothing, which is in no branch: it waits, and they do not.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.lookup.rows_in_flight_triton import ask_for_rows, one_of


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
def _pool(
    total, bag, last, i, block_end, rows_ptr, offsets_ptr, scales_ptr, feature_ptr, num_columns, dim, columns, one,
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
    v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
    ROWS: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Add to the sum of a bag before ``last`` what this block has of it; store the sum if the bag ends here."""
    if bag < last:
        begin = tl.load(offsets_ptr + bag)
        end = tl.load(offsets_ptr + bag + 1)
        for position in range(tl.maximum(begin, i), tl.minimum(end, block_end)):
            if tl.load(rows_ptr + position) >= 0:
                added = one_of(
                    position - i,
                    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
                    v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
                    ROWS,
                ).to(tl.float32)  # fmt: skip
                if WEIGHTED:
                    added = added * tl.load(scales_ptr + position)
                total += added
        if end <= block_end:
            if MEAN:
                pooled = total / tl.maximum(end - begin, 1).to(tl.float32)
            else:  # a copy: the next bag does not wait until this one is stored
                pooled = total * one
            tl.store(feature_ptr + tl.cast(bag, tl.int64) * num_columns + columns, pooled, mask=columns < dim)
            total = tl.zeros_like(total)
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
    pooled_0_ptr,  # the same memory, twice
    pooled_1_ptr,
    num_bags,  # F * B
    batch_size,  # B
    num_columns,  # D
    BLOCK_D: tl.constexpr,  # a power of two, at least the largest dim
    ROWS: tl.constexpr,  # positions of a block: 8, 16 or 32
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
):
    """``pooled_lookup``: any number of tables of any dims up to ``BLOCK_D`` in one launch."""
    columns = tl.arange(0, BLOCK_D)
    one = tl.minimum(num_bags, 1).to(tl.float32)
    nothing = tl.zeros((BLOCK_D,), dtype=tl.float32)
    no_columns = tl.minimum(num_bags, 0)
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
        first_element = first_column - tl.cast(feature * batch_size, tl.int64) * num_columns
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for i in range(begin, end, ROWS):
            (
                v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
                v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
            ) = ask_for_rows(i, end, rows_ptr, table_ptr, dim, dim, columns, ROWS)  # fmt: skip
            block_end = tl.minimum(i + ROWS, end)
            unfinished = bag  # the first bag that does not end in this block
            while (unfinished < last) & (tl.load(offsets_ptr + tl.minimum(unfinished + 1, last)) <= block_end):
                unfinished += 1
            for at in range(bag, tl.minimum(unfinished + 1, last), 2):
                tl.store(pooled_ptr + columns, nothing, mask=columns < no_columns)
                total = _pool(
                    total, at, last, i, block_end, rows_ptr, offsets_ptr, scales_ptr, pooled_0_ptr + first_element,
                    num_columns, dim, columns, one,
                    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
                    v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
                    ROWS, WEIGHTED, MEAN,
                )  # fmt: skip
                total = _pool(
                    total, at + 1, last, i, block_end, rows_ptr, offsets_ptr, scales_ptr, pooled_1_ptr + first_element,
                    num_columns, dim, columns, one,
                    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
                    v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
                    ROWS, WEIGHTED, MEAN,
                )  # fmt: skip
            bag = unfinished
        for empty in range(bag, last):  # without a position
            bag_ptr = pooled_ptr + first_element + tl.cast(empty, tl.int64) * num_columns
            tl.store(bag_ptr + columns, total, mask=columns < dim)
