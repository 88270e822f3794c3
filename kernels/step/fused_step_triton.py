"""``fused_step.py`` in Triton: the backward of pooled lookups and one optimizer step, row by row.

The positions of a batch are sorted by the row that they looked up, and cut into as many equal chunks as there are
programs, whatever the rows: one hot row does not hold up a launch. A program sums the gradients of each row that lies
in its chunk, in the order of the positions, and steps the row. The sum of a row that crosses a border of chunks is left
in parts, which the second kernel adds in order. There are no atomics: results do not depend on how programs are timed.

What a step does is a function of the rule, ``STEP``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gradient_of(
    position, bags_ptr, lengths_ptr, scales_ptr, first_columns_ptr, gradients_ptr,
    batch_size, num_columns, columns, mask, WEIGHTED: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """What one position adds to the gradient of its row."""
    bag = tl.load(bags_ptr + position)
    feature = bag // batch_size
    sample = bag - feature * batch_size
    bag_ptr = gradients_ptr + sample.to(tl.int64) * num_columns + tl.load(first_columns_ptr + feature)
    gradient = tl.load(bag_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if MEAN:
        gradient = gradient / tl.load(lengths_ptr + bag).to(tl.float32)
    if WEIGHTED:
        gradient = gradient * tl.load(scales_ptr + position)
    return gradient


@triton.jit
def _step_row(
    key, gradient, feature, tables_ptr, row_starts_ptr, dims_ptr,
    weights_ptr, new_weights_ptr, weight_starts_ptr, first_ptr, first_starts_ptr, second_ptr, second_starts_ptr,
    learning_rate, weight_decay, eps, first_share, second_beta, second_share, second_correction,
    columns, DECAYS: tl.constexpr, STEP: tl.constexpr, FIRST_IS_PER_ROW: tl.constexpr,
):  # fmt: skip
    """Step one row with the sum of its gradients."""
    table = tl.load(tables_ptr + feature)
    dim = tl.load(dims_ptr + table)
    row = key - tl.load(row_starts_ptr + table)
    mask = columns < dim
    start = tl.load(weight_starts_ptr + table) + row * dim
    weight = tl.load(weights_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
    if DECAYS:  # zero times an infinite weight would not be zero
        gradient = gradient + weight_decay * weight
    if FIRST_IS_PER_ROW:
        first_row_ptr = first_ptr + tl.load(first_starts_ptr + table) + row
    else:
        first_row_ptr = first_ptr + tl.load(first_starts_ptr + table) + row * dim
    second_row_ptr = second_ptr + tl.load(second_starts_ptr + table) + row * dim
    weight = STEP(
        weight, gradient, first_row_ptr, second_row_ptr, dim, columns, mask,
        learning_rate, eps, first_share, second_beta, second_share, second_correction,
    )  # fmt: skip
    tl.store(new_weights_ptr + start + columns, weight.to(new_weights_ptr.dtype.element_ty), mask=mask)


@triton.jit
def recfx_fused_step(
    keys_ptr,  # int64 [n], ascending: the row, counted through all tables; -1: of no row
    bags_ptr,  # int32 [n], the bag f * B + b of each position
    lengths_ptr,  # int64 [F * B], read if MEAN
    scales_ptr,  # float32 [n], read if WEIGHTED
    gradients_ptr,  # [B, D], of the pooled output
    first_columns_ptr,  # int32 [F], where the features' columns begin in it
    tables_ptr,  # int32 [F], the features' tables
    row_starts_ptr,  # int64 [T], the key of each table's row 0
    dims_ptr,  # int32 [T]
    weights_ptr,  # the first table; the others are reached from it
    new_weights_ptr,  # the same memory: reading a row does not wait until the row before it is written
    weight_starts_ptr,  # int64 [T], elements from the first table to each
    first_ptr,  # float32, the first state of the first table
    first_starts_ptr,  # int64 [T]
    second_ptr,  # float32, the second state of the first table
    second_starts_ptr,  # int64 [T]
    parts_ptr,  # float32 [programs, 2, BLOCK_D]: sums of the rows that began earlier, and of those that go on
    num_positions,  # n
    batch_size,  # B
    num_columns,  # D
    learning_rate,
    weight_decay,
    eps,
    first_share,
    second_beta,
    second_share,
    second_correction,
    BLOCK_D: tl.constexpr,  # a power of two, at least the largest dim
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    DECAYS: tl.constexpr,  # whether there is any weight decay
    STEP: tl.constexpr,
    FIRST_IS_PER_ROW: tl.constexpr,
):
    """Step the rows that lie in one chunk; leave the parts of the others."""
    program = tl.program_id(0)
    chunk = (num_positions + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = program * chunk
    end = tl.minimum(begin + chunk, num_positions)
    columns = tl.arange(0, BLOCK_D)
    began_earlier = 0
    if (begin > 0) & (begin < end):
        began_earlier = (tl.load(keys_ptr + begin - 1) == tl.load(keys_ptr + begin)).to(tl.int32)
    total = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for position in range(begin, end):
        key = tl.load(keys_ptr + position)
        feature = tl.load(bags_ptr + position) // batch_size
        dim = tl.load(dims_ptr + tl.load(tables_ptr + feature))
        present = tl.where(key >= 0, dim, 0)  # without a row: a prefix of no columns
        total += _gradient_of(
            position, bags_ptr, lengths_ptr, scales_ptr, first_columns_ptr, gradients_ptr,
            batch_size, num_columns, columns, columns < present, WEIGHTED, MEAN,
        )  # fmt: skip
        next_key = tl.load(keys_ptr + tl.minimum(position + 1, num_positions - 1))
        goes_on = (position + 1 < num_positions) & (next_key == key)
        if (position + 1 == end) | (next_key != key):
            if began_earlier == 1:
                tl.store(parts_ptr + (2 * program) * BLOCK_D + columns, total)
            elif goes_on:
                tl.store(parts_ptr + (2 * program + 1) * BLOCK_D + columns, total)
            elif key >= 0:
                _step_row(
                    key, total, feature, tables_ptr, row_starts_ptr, dims_ptr,
                    weights_ptr, new_weights_ptr, weight_starts_ptr,
                    first_ptr, first_starts_ptr, second_ptr, second_starts_ptr,
                    learning_rate, weight_decay, eps, first_share, second_beta, second_share, second_correction,
                    columns, DECAYS, STEP, FIRST_IS_PER_ROW,
                )  # fmt: skip
            total = tl.zeros((BLOCK_D,), dtype=tl.float32)
            began_earlier = 0


@triton.jit
def recfx_fused_step_of_borders(
    keys_ptr, bags_ptr, tables_ptr, row_starts_ptr, dims_ptr,
    weights_ptr, new_weights_ptr, weight_starts_ptr, first_ptr, first_starts_ptr, second_ptr, second_starts_ptr,
    parts_ptr, num_positions, num_chunks, batch_size,
    learning_rate, weight_decay, eps, first_share, second_beta, second_share, second_correction,
    BLOCK_D: tl.constexpr, DECAYS: tl.constexpr, STEP: tl.constexpr, FIRST_IS_PER_ROW: tl.constexpr,
):  # fmt: skip
    """Step the rows whose positions lie in several chunks; parameters as in the first kernel, with its chunks."""
    columns = tl.arange(0, BLOCK_D)
    chunk = (num_positions + num_chunks - 1) // num_chunks
    for first in range(tl.program_id(0), num_chunks - 1, tl.num_programs(0)):
        begin = first * chunk
        end = begin + chunk
        if end < num_positions:
            key = tl.load(keys_ptr + end - 1)
            goes_on = tl.load(keys_ptr + end) == key
            began_earlier = 0
            if begin > 0:
                began_earlier = (tl.load(keys_ptr + begin - 1) == key).to(tl.int32)
            if goes_on & (began_earlier == 0) & (key >= 0):
                total = tl.load(parts_ptr + (2 * first + 1) * BLOCK_D + columns)
                last = first + 1
                more = 1
                while more == 1:
                    following = (last + 1) * chunk
                    more = 0
                    if following < num_positions:
                        more = (tl.load(keys_ptr + following) == key).to(tl.int32)
                    last += 1
                for other in range(first + 1, last):
                    total += tl.load(parts_ptr + (2 * other) * BLOCK_D + columns)
                _step_row(
                    key, total, tl.load(bags_ptr + end - 1) // batch_size, tables_ptr, row_starts_ptr, dims_ptr,
                    weights_ptr, new_weights_ptr, weight_starts_ptr,
                    first_ptr, first_starts_ptr, second_ptr, second_starts_ptr,
                    learning_rate, weight_decay, eps, first_share, second_beta, second_share, second_correction,
                    columns, DECAYS, STEP, FIRST_IS_PER_ROW,
                )  # fmt: skip
