"""``quantized_lookup.py`` in Triton: rows of 8-bit or 4-bit codes, as ``quantized_rows.py`` lays them out.

The form is that of ``pooled_lookup_triton.py``: a program takes whole bags, and asks for the codes of eight rows before
it uses the first. The codes of a row are one vector of bytes under a mask that is a prefix. Two hazards of Ascend's
tool chain are kept away from: no vector is unsigned (bytes are read as int8, and masks in int32 give the codes), and no
vector is shifted (the high half of a byte stays where it is, sixteen times too large, and is multiplied by a sixteenth
of the scale, which is exact).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.lookup.pooled_lookup_triton import first_bag_of, row_at


@triton.jit
def _half_at(bytes_ptr):
    """A float16 that need not lie at an even address."""
    low = tl.load(bytes_ptr).to(tl.int32) & 255
    high = tl.load(bytes_ptr + 1).to(tl.int32)
    return ((high << 8) | low).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _codes_of(row, row_bytes, code_bytes, table_ptr, places):
    """The bytes with the codes of a row; of -1: zeros, a prefix of no bytes is read."""
    present = tl.where(row >= 0, code_bytes, 0)
    return tl.load(table_ptr + row * row_bytes + 4 + places, mask=places < present, other=0)


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
    num_bags,  # F * B
    batch_size,  # B
    num_columns,  # D
    BLOCK_D: tl.constexpr,  # a power of two, at least the largest dim, and at least 2 if BITS is 4
    BITS: tl.constexpr,  # 8 or 4
    EVEN: tl.constexpr,  # tables begin at even addresses, and row_bytes are even
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
):
    """``quantized_lookup``: any number of tables of any dims up to ``BLOCK_D`` in one launch."""
    columns = tl.arange(0, BLOCK_D)
    places = tl.arange(0, BLOCK_D * BITS // 8)
    one = tl.minimum(num_bags, 1).to(tl.float32)
    low = first_bag_of(tl.program_id(0), offsets_ptr, num_bags)
    high = first_bag_of(tl.program_id(0) + 1, offsets_ptr, num_bags)
    bags = tl.maximum(batch_size, 1)
    for feature in range(low // bags, (high - 1) // bags + 1):
        bag = tl.maximum(low, feature * batch_size)
        last = tl.minimum(high, (feature + 1) * batch_size)
        begin = tl.load(offsets_ptr + bag)
        end = tl.load(offsets_ptr + last)
        table_start = tl.load(table_starts_ptr + feature)
        table_ptr = bytes_ptr + table_start
        row_bytes = tl.load(row_bytes_ptr + feature)
        first_column = tl.load(first_columns_ptr + feature)
        dim = tl.load(first_columns_ptr + feature + 1) - first_column
        code_bytes = (dim * BITS + 7) // 8
        feature_ptr = pooled_ptr + first_column - tl.cast(feature * batch_size, tl.int64) * num_columns
        total = tl.zeros((BLOCK_D * BITS // 8,), dtype=tl.float32)  # of 4 bits: the even columns
        total_odd = tl.zeros((BLOCK_D * BITS // 8,), dtype=tl.float32)
        for i in range(begin, end, 8):
            row_0, row_1 = row_at(i, end, rows_ptr), row_at(i + 1, end, rows_ptr)
            row_2, row_3 = row_at(i + 2, end, rows_ptr), row_at(i + 3, end, rows_ptr)
            row_4, row_5 = row_at(i + 4, end, rows_ptr), row_at(i + 5, end, rows_ptr)
            row_6, row_7 = row_at(i + 6, end, rows_ptr), row_at(i + 7, end, rows_ptr)
            codes_0 = _codes_of(row_0, row_bytes, code_bytes, table_ptr, places)
            codes_1 = _codes_of(row_1, row_bytes, code_bytes, table_ptr, places)
            codes_2 = _codes_of(row_2, row_bytes, code_bytes, table_ptr, places)
            codes_3 = _codes_of(row_3, row_bytes, code_bytes, table_ptr, places)
            codes_4 = _codes_of(row_4, row_bytes, code_bytes, table_ptr, places)
            codes_5 = _codes_of(row_5, row_bytes, code_bytes, table_ptr, places)
            codes_6 = _codes_of(row_6, row_bytes, code_bytes, table_ptr, places)
            codes_7 = _codes_of(row_7, row_bytes, code_bytes, table_ptr, places)
            block_end = tl.minimum(i + 8, end)
            unfinished = bag  # the first bag that does not end in this block
            while (unfinished < last) & (tl.load(offsets_ptr + tl.minimum(unfinished + 1, last)) <= block_end):
                unfinished += 1
            for at in range(bag, tl.minimum(unfinished + 1, last)):
                bag_begin = tl.load(offsets_ptr + at)
                bag_end = tl.load(offsets_ptr + at + 1)
                for position in range(tl.maximum(bag_begin, i), tl.minimum(bag_end, block_end)):
                    row = tl.load(rows_ptr + position)
                    if row >= 0:
                        place = position - i
                        byte = codes_0.to(tl.int32)
                        if place == 1:
                            byte = codes_1.to(tl.int32)
                        if place == 2:
                            byte = codes_2.to(tl.int32)
                        if place == 3:
                            byte = codes_3.to(tl.int32)
                        if place == 4:
                            byte = codes_4.to(tl.int32)
                        if place == 5:
                            byte = codes_5.to(tl.int32)
                        if place == 6:
                            byte = codes_6.to(tl.int32)
                        if place == 7:
                            byte = codes_7.to(tl.int32)
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
                if bag_end <= block_end:
                    pooled = total
                    if BITS == 4:
                        pooled = tl.interleave(total, total_odd)
                    if MEAN:
                        pooled = pooled / tl.maximum(bag_end - bag_begin, 1).to(tl.float32)
                    else:  # a copy: the next bag does not wait until this one is stored
                        pooled = pooled * one
                    bag_ptr = feature_ptr + tl.cast(at, tl.int64) * num_columns
                    tl.store(bag_ptr + columns, pooled.to(pooled_ptr.dtype.element_ty), mask=columns < dim)
                    total = tl.zeros_like(total)
                    total_odd = tl.zeros_like(total)
            bag = unfinished
        for empty in range(bag, last):  # without a position
            nothing = tl.zeros((BLOCK_D,), dtype=pooled_ptr.dtype.element_ty)
            tl.store(feature_ptr + tl.cast(empty, tl.int64) * num_columns + columns, nothing, mask=columns < dim)
