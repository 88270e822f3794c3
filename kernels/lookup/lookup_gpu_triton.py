"""The lookups in Triton, and the gradient of the weights of ids, in the form that suits a GPU: a program has a tile of
bags (or ids) and columns.

Bags of a tile take turns together: in each, every bag adds its next row, so rows are added in the order of the ids. A
GPU hides the way to memory behind other warps, and so needs no rows in flight by name as an NPU does.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.build.segments_triton import segments_of


@triton.jit
def _bags_of(offsets_ptr, first_columns_ptr, num_bags, batch_size, num_columns, BAGS: tl.constexpr):
    """The bags of a program: their features, positions, columns, and where the output has them."""
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    is_bag = bag < num_bags
    feature = bag // tl.maximum(batch_size, 1)
    begin = tl.load(offsets_ptr + bag, mask=is_bag, other=0)
    end = tl.load(offsets_ptr + bag + 1, mask=is_bag, other=0)
    first_column = tl.load(first_columns_ptr + feature, mask=is_bag, other=0)
    dim = tl.load(first_columns_ptr + feature + 1, mask=is_bag, other=0) - first_column
    place = (bag - feature * batch_size).to(tl.int64) * num_columns + first_column
    return is_bag, feature, begin, end, dim, place


@triton.jit
def recfx_pooled_lookup_on_gpu(
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
    BAGS: tl.constexpr,  # of a program
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
):
    """``pooled_lookup``: any number of tables of any dims up to ``BLOCK_D`` in one launch."""
    is_bag, feature, begin, end, dim, place = _bags_of(
        offsets_ptr, first_columns_ptr, num_bags, batch_size, num_columns, BAGS
    )
    columns = tl.arange(0, BLOCK_D)
    inside_row = columns[None, :] < dim[:, None]
    table_ptr = weights_ptr + tl.load(table_starts_ptr + feature, mask=is_bag, other=0)
    total = tl.zeros((BAGS, BLOCK_D), dtype=tl.float32)
    for turn in range(0, tl.max(end - begin, 0)):
        position = begin + turn
        row = tl.load(rows_ptr + position, mask=position < end, other=-1)
        values_ptr = (table_ptr + row * dim)[:, None] + columns[None, :]
        added = tl.load(values_ptr, mask=(row >= 0)[:, None] & inside_row, other=0.0).to(tl.float32)
        if WEIGHTED:
            added = added * tl.load(scales_ptr + position, mask=row >= 0, other=0.0)[:, None]
        total += added
    if MEAN:
        total = total / tl.maximum(end - begin, 1).to(tl.float32)[:, None]
    tl.store(pooled_ptr + place[:, None] + columns[None, :], total, mask=inside_row)


@triton.jit
def recfx_per_sample_weight_gradients_on_gpu(
    rows_ptr,  # int64 [n]
    offsets_ptr,  # int64 [F * B + 1]
    gradients_ptr,  # [B, D], of the pooled output
    first_columns_ptr,  # int32 [F + 1]
    weights_ptr,  # the first table; the others are reached from it
    table_starts_ptr,  # int64 [F], elements from the first table to the feature's
    scale_gradients_ptr,  # float32 [n]
    num_bags,  # F * B
    batch_size,  # B
    num_columns,  # D
    BLOCK_D: tl.constexpr,  # a power of two, at least the largest dim
    BAGS: tl.constexpr,  # of a program
):
    """``per_sample_weight_gradients``: for each position, the gradient of its bag times its row; 0 for a row of -1."""
    is_bag, feature, begin, end, dim, place = _bags_of(
        offsets_ptr, first_columns_ptr, num_bags, batch_size, num_columns, BAGS
    )
    columns = tl.arange(0, BLOCK_D)
    inside_row = columns[None, :] < dim[:, None]
    table_ptr = weights_ptr + tl.load(table_starts_ptr + feature, mask=is_bag, other=0)
    gradient = tl.load(gradients_ptr + place[:, None] + columns[None, :], mask=inside_row, other=0.0).to(tl.float32)
    for turn in range(0, tl.max(end - begin, 0)):
        position = begin + turn
        row = tl.load(rows_ptr + position, mask=position < end, other=-1)
        values_ptr = (table_ptr + row * dim)[:, None] + columns[None, :]
        values = tl.load(values_ptr, mask=(row >= 0)[:, None] & inside_row, other=0.0).to(tl.float32)
        product = tl.where(row >= 0, tl.sum(gradient * values, 1), 0.0)
        tl.store(scale_gradients_ptr + position, product, mask=position < end)


@triton.jit
def recfx_gather_rows_on_gpu(
    rows_ptr,  # int64 [n]
    borders_ptr,  # int64 [F + 1], where the positions of each feature begin
    weights_ptr,  # the first table; the others are reached from it
    table_starts_ptr,  # int64 [F], elements from the first table to the feature's
    gathered_ptr,  # float32 [n, dim]
    num_positions,  # n
    num_features,  # F
    dim,  # of all tables
    BLOCK_D: tl.constexpr,  # a power of two, at least dim
    BAGS: tl.constexpr,  # positions of a program
):
    """``pooled_lookup`` without pooling: any number of tables in one launch; zeros for rows of -1."""
    first = tl.program_id(0).to(tl.int64) * BAGS
    position = first + tl.arange(0, BAGS)
    is_inside = position < num_positions
    feature = segments_of(first, position, is_inside, borders_ptr + 1, num_features)
    row = tl.load(rows_ptr + position, mask=is_inside, other=-1)
    columns = tl.arange(0, BLOCK_D)
    inside_row = (columns < dim)[None, :]
    table_ptr = weights_ptr + tl.load(table_starts_ptr + feature)
    values = tl.load(
        (table_ptr + row * dim)[:, None] + columns[None, :], mask=(row >= 0)[:, None] & inside_row, other=0.0
    )
    to_ptr = (gathered_ptr + position * dim)[:, None] + columns[None, :]
    tl.store(to_ptr, values.to(tl.float32), mask=is_inside[:, None] & inside_row)


@triton.jit
def _half(bits):
    """The float16 of the lowest 16 bits, in float32."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def recfx_quantized_lookup_on_gpu(
    rows_ptr,  # int64 [n]
    offsets_ptr,  # int64 [F * B + 1]
    scales_ptr,  # float32 [n], per-sample weights, read if WEIGHTED
    words_ptr,  # int32, the first table; the others are reached from it
    table_starts_ptr,  # int64 [F], words from the first table to the feature's
    row_words_ptr,  # int32 [F], words from one row of the feature's table to the next
    first_columns_ptr,  # int32 [F + 1], the columns of the output that the features fill
    pooled_ptr,  # [B, D], float32 or float16
    num_bags,  # F * B
    batch_size,  # B
    num_columns,  # D
    BLOCK_D: tl.constexpr,  # a power of two, at least the largest dim, and at least the codes of a word
    BAGS: tl.constexpr,  # of a program
    BITS: tl.constexpr,  # 8 or 4
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
):
    """``quantized_lookup`` of tables whose rows are whole words: a word of scale and bias, and words of codes."""
    CODES: tl.constexpr = 32 // BITS
    is_bag, feature, begin, end, dim, place = _bags_of(
        offsets_ptr, first_columns_ptr, num_bags, batch_size, num_columns, BAGS
    )
    words, parts = tl.arange(0, BLOCK_D // CODES), tl.arange(0, CODES)
    inside_row = words[None, :] * CODES < dim[:, None]
    row_words = tl.load(row_words_ptr + feature, mask=is_bag, other=0)
    table_ptr = words_ptr + tl.load(table_starts_ptr + feature, mask=is_bag, other=0)
    total = tl.zeros((BAGS, BLOCK_D // CODES, CODES), dtype=tl.float32)
    for turn in range(0, tl.max(end - begin, 0)):
        position = begin + turn
        row = tl.load(rows_ptr + position, mask=position < end, other=-1)
        row_ptr = table_ptr + row * row_words
        head = tl.load(row_ptr, mask=row >= 0, other=0)
        scale, bias = _half(head), _half(head >> 16)
        if WEIGHTED:
            weight = tl.load(scales_ptr + position, mask=row >= 0, other=0.0)
            scale, bias = scale * weight, bias * weight
        word = tl.load(row_ptr[:, None] + 1 + words[None, :], mask=(row >= 0)[:, None] & inside_row, other=0)
        codes = (word[:, :, None] >> (parts * BITS)[None, None, :]) & ((1 << BITS) - 1)
        total += codes.to(tl.float32) * scale[:, None, None] + bias[:, None, None]
    if MEAN:
        total = total / tl.maximum(end - begin, 1).to(tl.float32)[:, None, None]
    columns = words[:, None] * CODES + parts[None, :]
    to_ptr = (pooled_ptr + place)[:, None, None] + columns[None, :, :]
    tl.store(to_ptr, total.to(pooled_ptr.dtype.element_ty), mask=columns[None, :, :] < dim[:, None, None])
