"""The gradient of pooled lookups with respect to their per-sample weights, in Triton: a dot product per position.

A program takes bags that lie side by side, and asks for the gradient of a bag and for eight of its rows before it uses
the first.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.lookup.pooled_lookup_triton import first_bag_of, row_at, values_of


@triton.jit
def recfx_per_sample_weight_gradients(
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
):
    """For each position, the gradient of its bag times its row; 0 for a row of -1."""
    columns = tl.arange(0, BLOCK_D)
    low = first_bag_of(tl.program_id(0), offsets_ptr, num_bags)
    high = first_bag_of(tl.program_id(0) + 1, offsets_ptr, num_bags)
    bags = tl.maximum(batch_size, 1)
    for feature in range(low // bags, (high - 1) // bags + 1):
        first_column = tl.load(first_columns_ptr + feature)
        dim = tl.load(first_columns_ptr + feature + 1) - first_column
        table_ptr = weights_ptr + tl.load(table_starts_ptr + feature)
        first_bag = feature * batch_size
        feature_ptr = gradients_ptr + first_column - tl.cast(first_bag, tl.int64) * num_columns
        for bag in range(tl.maximum(low, first_bag), tl.minimum(high, first_bag + batch_size)):
            gradient_ptr = feature_ptr + tl.cast(bag, tl.int64) * num_columns
            gradient = tl.load(gradient_ptr + columns, mask=columns < dim, other=0.0).to(tl.float32)
            end = tl.load(offsets_ptr + bag + 1)
            for i in range(tl.load(offsets_ptr + bag), end, 8):
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
                for position in range(i, tl.minimum(i + 8, end)):
                    place = position - i
                    products = gradient * values_0.to(tl.float32)
                    if place == 1:
                        products = gradient * values_1.to(tl.float32)
                    if place == 2:
                        products = gradient * values_2.to(tl.float32)
                    if place == 3:
                        products = gradient * values_3.to(tl.float32)
                    if place == 4:
                        products = gradient * values_4.to(tl.float32)
                    if place == 5:
                        products = gradient * values_5.to(tl.float32)
                    if place == 6:
                        products = gradient * values_6.to(tl.float32)
                    if place == 7:
                        products = gradient * values_7.to(tl.float32)
                    product = tl.sum(products, axis=0)
                    # Without a row, a gradient that is infinite or no number would not give zero.
                    is_present = tl.load(rows_ptr + position) >= 0
                    tl.store(scale_gradients_ptr + position, tl.where(is_present, product, 0.0))
