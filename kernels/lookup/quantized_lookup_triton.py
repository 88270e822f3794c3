"""``quantized_lookup.py`` in Triton: rows of 8-bit or 4-bit codes, as ``quantized_rows.py`` lays them out.

The form is that of ``pooled_lookup_triton.py``: a program takes whole bags, and reads the codes of a row as one vector
of bytes under a mask that is a prefix. Two hazards of Ascend's tool chain are kept away from: no vector is unsigned
(bytes are read as int8, and masks in int32 give the codes), and no vector is shifted (the high half of a byte stays
where it is, sixteen times too large, and is multiplied by a sixteenth of the scale, which is exact).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _half_at(bytes_ptr):
    """A float16 that need not lie at an even address."""
    low = tl.load(bytes_ptr).to(tl.int32) & 255
    high = tl.load(bytes_ptr + 1).to(tl.int32)
    return ((high << 8) | low).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


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
    for bag in range(tl.program_id(0), num_bags, tl.num_programs(0)):
        feature = bag // batch_size
        sample = bag - feature * batch_size
        table_start = tl.load(table_starts_ptr + feature)
        row_bytes = tl.load(row_bytes_ptr + feature)
        first_column = tl.load(first_columns_ptr + feature)
        dim = tl.load(first_columns_ptr + feature + 1) - first_column
        code_bytes = (dim * BITS + 7) // 8
        begin = tl.load(offsets_ptr + bag)
        end = tl.load(offsets_ptr + bag + 1)
        total = tl.zeros((BLOCK_D * BITS // 8,), dtype=tl.float32)  # of 4 bits: the even columns
        total_odd = tl.zeros((BLOCK_D * BITS // 8,), dtype=tl.float32)
        for position in range(begin, end):
            row = tl.load(rows_ptr + position)
            row_start = table_start + row * row_bytes
            scale = tl.full((), 0.0, tl.float32)  # a row of -1 adds nothing, and nothing of it is read
            bias = tl.full((), 0.0, tl.float32)
            if row >= 0:
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
            present = tl.where(row >= 0, code_bytes, 0)  # a prefix of no bytes
            byte = tl.load(bytes_ptr + row_start + 4 + places, mask=places < present, other=0).to(tl.int32)
            if BITS == 8:
                total += (byte & 255).to(tl.float32) * scale + bias
            else:
                total += (byte & 15).to(tl.float32) * scale + bias
                total_odd += (byte & 240).to(tl.float32) * (scale * 0.0625) + bias
        if BITS == 4:
            total = tl.interleave(total, total_odd)
        if MEAN:
            total = total / tl.maximum(end - begin, 1).to(tl.float32)
        bag_ptr = pooled_ptr + sample.to(tl.int64) * num_columns + first_column
        tl.store(bag_ptr + columns, total.to(pooled_ptr.dtype.element_ty), mask=columns < dim)
