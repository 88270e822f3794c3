"""The gradient of pooled lookups with respect to their per-sample weights, in Triton: a dot product per position.

A program takes bags that lie side by side, and asks for the gradient of a bag and for eight of its rows before it uses
the first. The products of eight positions are stored at once: storing one would wait for the one before.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.lookup.pooled_lookup_triton import first_bag_of
from recfx.kernels.lookup.rows_in_flight_triton import one_of_eight, row_at, values_of


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
    places = tl.arange(0, 8)
    numbers = places.to(tl.float32)
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
                block_end = tl.minimum(i + 8, end)
                products = tl.zeros((8,), dtype=tl.float32)
                for position in range(i, block_end):
                    # Without a row, a gradient that is infinite or no number would not give zero.
                    if tl.load(rows_ptr + position) >= 0:
                        values = one_of_eight(
                            position - i,
                            values_0, values_1, values_2, values_3, values_4, values_5, values_6, values_7,
                        )  # fmt: skip
                        product = tl.sum(gradient * values.to(tl.float32), axis=0)
                        products += tl.where(numbers == tl.cast(position - i, tl.float32), product, 0.0)
                tl.store(scale_gradients_ptr + i + places, products, mask=places < block_end - i)
