"""``quantized_lookup.py`` in Triton: rows of 8-bit or 4-bit codes, as ``quantized_rows.py`` lays them out.

The form is that of ``pooled_lookup_triton.py``: a program takes whole bags, and asks for the codes of a block of rows
before it uses the first. The codes of a row are one vector of bytes under a mask that is a prefix. Two hazards of
Ascend's tool chain are kept away from: no vector is unsigned (bytes are read as int8, and masks in int32 give the
codes), and no vector is shifted (the high half of a byte stays where it is, sixteen times too large, and is multiplied
by a sixteenth of the scale, which is exact).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.lookup.pooled_lookup_triton import first_bag_of
from recfx.kernels.lookup.rows_in_flight_triton import ask_for_rows, one_of


@triton.jit
def _half_at(bytes_ptr):
    """A float16 that need not lie at an even address."""
    low = tl.load(bytes_ptr).to(tl.int32) & 255
    high = tl.load(bytes_ptr + 1).to(tl.int32)
    return ((high << 8) | low).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _pool(
    total, total_odd, bag, last, i, block_end, rows_ptr, offsets_ptr, scales_ptr, bytes_ptr, halves_ptr, table_start,
    row_bytes, feature_ptr, num_columns, dim, columns, one,
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
    v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
    ROWS: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Add to the sums of a bag before ``last`` what this block has of it; store them if the bag ends here."""
    if bag < last:
        begin = tl.load(offsets_ptr + bag)
        end = tl.load(offsets_ptr + bag + 1)
        for position in range(tl.maximum(begin, i), tl.minimum(end, block_end)):
            row = tl.load(rows_ptr + position)
            if row >= 0:
                byte = one_of(
                    position - i,
                    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
                    v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
                    ROWS,
                ).to(tl.int32)  # fmt: skip
                row_start = table_start + row * row_bytes
                if EVEN:
                    scale = tl.load(halves_ptr + row_start // 2).to(tl.float32)
                    bias = tl.load(halves_ptr + row_start // 2 + 1).to(tl.float32)
                else:
                    scale = _half_at(bytes_ptr + row_start)
                    bias = _half_at(bytes_ptr + row_start + 2)
                if WEIGHTED:
                    weight = tl.load(scales_ptr + position)
                    scale = scale * weight
                    bias = bias * weight
                if BITS == 8:
                    total += (byte & 255).to(tl.float32) * scale + bias
                else:
                    total += (byte & 15).to(tl.float32) * scale + bias
                    total_odd += (byte & 240).to(tl.float32) * (scale * 0.0625) + bias
        if end <= block_end:
            pooled = total
            if BITS == 4:
                pooled = tl.interleave(total, total_odd)
            if MEAN:
                pooled = pooled / tl.maximum(end - begin, 1).to(tl.float32)
            else:  # a copy: the next bag does not wait until this one is stored
                pooled = pooled * one
            bag_ptr = feature_ptr + tl.cast(bag, tl.int64) * num_columns
            tl.store(bag_ptr + columns, pooled.to(feature_ptr.dtype.element_ty), mask=columns < dim)
            total = tl.zeros_like(total)
            total_odd = tl.zeros_like(total)
    return total, total_odd


@triton.jit
def recfx_quantized_lookup(
    rows_ptr,  # int64 [n]
    offsets_ptr,  # int64 [F * B + 1]
    scales_ptr,  # float32 [n], per-sample weights, read if WEIGHTED
    bytes_ptr,  # int8, the first table; the others are reached from it
    halves_ptr,  # float16, the same memory, read if EVEN
    table_starts_ptr,  # int64 [F], bytes from the first table to the feature's
    row_bytes_ptr,  # int32 [F], bytes from one row of the feature's table to the next
    first_columns_ptr,  # int32 [F + 1], the columns of the output that the features fill
    pooled_ptr,  # [B, D], float32 or float16
    pooled_0_ptr,  # the same memory, twice
    pooled_1_ptr,
    num_bags,  # F * B
    batch_size,  # B
    num_columns,  # D
    BLOCK_D: tl.constexpr,  # a power of two, at least the largest dim, and at least 2 if BITS is 4
    ROWS: tl.constexpr,  # positions of a block: 8, 16 or 32
    BITS: tl.constexpr,  # 8 or 4
    EVEN: tl.constexpr,  # tables begin at even addresses, and row_bytes are even
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
):
    """``quantized_lookup``: any number of tables of any dims up to ``BLOCK_D`` in one launch."""
    columns = tl.arange(0, BLOCK_D)
    places = tl.arange(0, BLOCK_D * BITS // 8)
    one = tl.minimum(num_bags, 1).to(tl.float32)
    nothing = tl.zeros((BLOCK_D,), dtype=pooled_ptr.dtype.element_ty)
    no_columns = tl.minimum(num_bags, 0)
    low = first_bag_of(tl.program_id(0), offsets_ptr, num_bags)
    high = first_bag_of(tl.program_id(0) + 1, offsets_ptr, num_bags)
    bags = tl.maximum(batch_size, 1)
    for feature in range(low // bags, (high - 1) // bags + 1):
        bag = tl.maximum(low, feature * batch_size)
        last = tl.minimum(high, (feature + 1) * batch_size)
        begin = tl.load(offsets_ptr + bag)
        end = tl.load(offsets_ptr + last)
        table_start = tl.load(table_starts_ptr + feature)
        row_bytes = tl.load(row_bytes_ptr + feature)
        first_column = tl.load(first_columns_ptr + feature)
        dim = tl.load(first_columns_ptr + feature + 1) - first_column
        code_bytes = (dim * BITS + 7) // 8
        first_element = first_column - tl.cast(feature * batch_size, tl.int64) * num_columns
        total = tl.zeros((BLOCK_D * BITS // 8,), dtype=tl.float32)  # of 4 bits: the even columns
        total_odd = tl.zeros((BLOCK_D * BITS // 8,), dtype=tl.float32)
        for i in range(begin, end, ROWS):
            (
                v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
                v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
            ) = ask_for_rows(
                i, end, rows_ptr, bytes_ptr + table_start + 4, row_bytes, code_bytes, places, ROWS
            )  # fmt: skip
            block_end = tl.minimum(i + ROWS, end)
            unfinished = bag  # the first bag that does not end in this block
            while (unfinished < last) & (tl.load(offsets_ptr + tl.minimum(unfinished + 1, last)) <= block_end):
                unfinished += 1
            for at in range(bag, tl.minimum(unfinished + 1, last), 2):
                tl.store(pooled_ptr + columns, nothing, mask=columns < no_columns)
                total, total_odd = _pool(
                    total, total_odd, at, last, i, block_end, rows_ptr, offsets_ptr, scales_ptr, bytes_ptr,
                    halves_ptr, table_start, row_bytes, pooled_0_ptr + first_element, num_columns, dim, columns, one,
                    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
                    v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
                    ROWS, BITS, EVEN, WEIGHTED, MEAN,
                )  # fmt: skip
                total, total_odd = _pool(
                    total, total_odd, at + 1, last, i, block_end, rows_ptr, offsets_ptr, scales_ptr, bytes_ptr,
                    halves_ptr, table_start, row_bytes, pooled_1_ptr + first_element, num_columns, dim, columns, one,
                    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
                    v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
                    ROWS, BITS, EVEN, WEIGHTED, MEAN,
                )  # fmt: skip
            bag = unfinished
        for empty in range(bag, last):  # without a position
            bag_ptr = pooled_ptr + first_element + tl.cast(empty, tl.int64) * num_columns
            tl.store(bag_ptr + columns, nothing, mask=columns < dim)
