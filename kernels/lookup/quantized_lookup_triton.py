"""``quantized_lookup.py`` in Triton: rows of 8-bit or 4-bit codes, as ``quantized_rows.py`` lays them out.

The form is that of ``pooled_lookup_triton.py``: a program takes whole bags, and asks for a block of rows before it uses
the first. The bytes of their scales and biases come beside the codes, not as scalars, and all rows of a block are
dequantized at once. Rows are read as vectors of bytes under masks that are prefixes.

Two hazards of Ascend's tool chain are kept away from: nothing is computed with vectors of unsigned numbers (bytes are
taken as such only to become floats, for which the compilers have an instruction), and no vector is shifted (the high
half of a byte stays where it is, sixteen times too large, and is multiplied by a sixteenth of the scale, which is
exact).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.build.overlap_triton import prefix_at
from recfx.kernels.lookup.pooled_lookup_triton import first_bag_of
from recfx.kernels.lookup.rows_in_flight_triton import ask_for_rows, rows_side_by_side


@triton.jit
def _unsigned(signed):
    """Bytes without their sign, in float32."""
    return signed.to(tl.uint8, bitcast=True).to(tl.float32)


@triton.jit
def _halves_at(byte, low_bytes, high_bytes, ROWS: tl.constexpr):
    """The float16 that begins at a byte of each of the heads, which are 32 bytes apart."""
    lanes = tl.arange(0, ROWS) * 32 + byte
    bits = tl.gather(low_bytes, lanes, 0) + tl.gather(high_bytes, lanes + 1, 0) * 256.0
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _dequantize(
    i, end, always, rows_ptr, scales_ptr, table_ptr, row_bytes, code_bytes,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """The values of a block of rows, ``WIDTH`` of each: of all columns, or of 4 bits, of the even and the odd ones."""
    (
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
    ) = ask_for_rows(
        i, end, rows_ptr, table_ptr + 4, row_bytes, code_bytes, tl.arange(0, WIDTH), ROWS
    )  # fmt: skip
    (
        h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11, h12, h13, h14, h15,
        h16, h17, h18, h19, h20, h21, h22, h23, h24, h25, h26, h27, h28, h29, h30, h31,
    ) = ask_for_rows(i, end, rows_ptr, table_ptr, row_bytes, 4, tl.arange(0, 32), ROWS)  # fmt: skip
    codes = rows_side_by_side(
        always,
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15,
        v16, v17, v18, v19, v20, v21, v22, v23, v24, v25, v26, v27, v28, v29, v30, v31,
        WIDTH, ROWS,
    )  # fmt: skip
    heads = rows_side_by_side(
        always,
        h0, h1, h2, h3, h4, h5, h6, h7, h8, h9, h10, h11, h12, h13, h14, h15,
        h16, h17, h18, h19, h20, h21, h22, h23, h24, h25, h26, h27, h28, h29, h30, h31,
        32, ROWS,
    )  # fmt: skip
    low_bytes, high_bytes = _unsigned(heads), heads.to(tl.float32)
    scales = _halves_at(0, low_bytes, high_bytes, ROWS)
    biases = _halves_at(2, low_bytes, high_bytes, ROWS)
    if WEIGHTED:
        weights = prefix_at(scales_ptr + i, tl.arange(0, ROWS), end - i)
        scales = scales * weights
        biases = biases * weights
    codes = tl.reshape(codes, (ROWS, WIDTH))
    if BITS == 8:
        values = _unsigned(codes) * scales[:, None] + biases[:, None]
        odd = scales  # not used
    else:
        values = (codes & 15).to(tl.float32) * scales[:, None] + biases[:, None]
        odd = _unsigned(codes & -16) * (scales * 0.0625)[:, None] + biases[:, None]
        odd = tl.reshape(odd, (ROWS * WIDTH,))
    return tl.reshape(values, (ROWS * WIDTH,)), odd


@triton.jit
def _pool(
    total, total_odd, bag, last, i, block_end, rows_ptr, offsets_ptr, values, odd, feature_ptr, num_columns, dim,
    columns, places, one, WIDTH: tl.constexpr, BITS: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Add to the sums of a bag before ``last`` what this block has of it; store them if the bag ends here."""
    if bag < last:
        begin = tl.load(offsets_ptr + bag)
        end = tl.load(offsets_ptr + bag + 1)
        for position in range(tl.maximum(begin, i), tl.minimum(end, block_end)):
            if tl.load(rows_ptr + position) >= 0:
                of_row = places + tl.cast(position - i, tl.int32) * WIDTH
                total += tl.gather(values, of_row, 0)
                if BITS == 4:
                    total_odd += tl.gather(odd, of_row, 0)
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
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
):
    """``quantized_lookup``: any number of tables of any dims up to ``BLOCK_D`` in one launch."""
    PLACES: tl.constexpr = BLOCK_D * BITS // 8  # bytes of codes
    WIDTH: tl.constexpr = PLACES if PLACES > 32 else 32
    columns = tl.arange(0, BLOCK_D)
    places = tl.arange(0, PLACES)
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
        table_ptr = bytes_ptr + tl.load(table_starts_ptr + feature)
        row_bytes = tl.load(row_bytes_ptr + feature)
        first_column = tl.load(first_columns_ptr + feature)
        dim = tl.load(first_columns_ptr + feature + 1) - first_column
        code_bytes = (dim * BITS + 7) // 8
        first_element = first_column - tl.cast(feature * batch_size, tl.int64) * num_columns
        total = tl.zeros((PLACES,), dtype=tl.float32)  # of 4 bits: the even columns
        total_odd = tl.zeros((PLACES,), dtype=tl.float32)
        for i in range(begin, end, ROWS):
            values, odd = _dequantize(
                i, end, no_columns == 0, rows_ptr, scales_ptr, table_ptr, row_bytes, code_bytes,
                ROWS, WIDTH, BITS, WEIGHTED,
            )  # fmt: skip
            block_end = tl.minimum(i + ROWS, end)
            unfinished = bag  # the first bag that does not end in this block
            while (unfinished < last) & (tl.load(offsets_ptr + tl.minimum(unfinished + 1, last)) <= block_end):
                unfinished += 1
            for at in range(bag, tl.minimum(unfinished + 1, last), 2):
                tl.store(pooled_ptr + columns, nothing, mask=columns < no_columns)
                total, total_odd = _pool(
                    total, total_odd, at, last, i, block_end, rows_ptr, offsets_ptr, values, odd,
                    pooled_0_ptr + first_element, num_columns, dim, columns, places, one, WIDTH, BITS, MEAN,
                )  # fmt: skip
                total, total_odd = _pool(
                    total, total_odd, at + 1, last, i, block_end, rows_ptr, offsets_ptr, values, odd,
                    pooled_1_ptr + first_element, num_columns, dim, columns, places, one, WIDTH, BITS, MEAN,
                )  # fmt: skip
            bag = unfinished
        for empty in range(bag, last):  # without a position
            bag_ptr = pooled_ptr + first_element + tl.cast(empty, tl.int64) * num_columns
            tl.store(bag_ptr + columns, nothing, mask=columns < dim)
