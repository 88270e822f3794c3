"""``fused_step.py`` in Triton: the backward of pooled lookups and one optimizer step, row by row.

The positions of a batch are sorted by the row that they looked up, and cut into as many equal chunks as there are
programs, whatever the rows: one hot row does not hold up a launch. A program sums the gradients of each row that lies
in its chunk, in the order of the positions, and steps the row. The sum of a row that crosses a border of chunks is left
in parts, which the second kernel adds in order. There are no atomics: results do not depend on how programs are timed.

A program walks through its positions in blocks. It asks for all that a block needs, gradients, weights and states,
before it uses the first of them: the way to memory is waited for once in a block. Columns that a row does not have are
undefined, and so is what a row does not need.

Ascend's compiler has a store wait for the one before through the same pointer, and a load for the store. Weights and
states come through one pointer and go through others, one for each of two or four places that follow one another. In
front of them is a store of nothing, which is in no branch: it waits for what was stored before, and none of them does.

What a step does is a function of the rule, ``STEP``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.build.overlap_triton import prefix_at


@triton.jit
def _first_of(key, low, high, keys_ptr):
    """The first position from low on, and before high, with at least this key; high if there is none."""
    while low < high:
        middle = low + (high - low) // 2
        if tl.load(keys_ptr + middle) < key:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def _gradient_at(position, stop, bags_ptr, first_columns_ptr, gradients_ptr, batch_size, num_columns, dim, columns):
    """The gradient of the bag of a position; from ``stop`` on nothing is read."""
    bag = tl.load(bags_ptr + tl.minimum(position, stop - 1))
    feature = bag // batch_size
    sample = bag - feature * batch_size
    bag_ptr = gradients_ptr + sample.to(tl.int64) * num_columns + tl.load(first_columns_ptr + feature)
    return prefix_at(bag_ptr, columns, tl.where(position < stop, dim, 0))


@triton.jit
def _plus(
    total, gradient, position, stop, bags_ptr, lengths_ptr, scales_ptr, WEIGHTED: tl.constexpr, MEAN: tl.constexpr
):  # fmt: skip
    """A sum, and what a position before ``stop`` adds to it."""
    if position < stop:
        if MEAN:
            gradient = gradient / tl.load(lengths_ptr + tl.load(bags_ptr + position)).to(tl.float32)
        if WEIGHTED:
            gradient = gradient * tl.load(scales_ptr + position)
        total += gradient
    return total


@triton.jit
def _row_of(
    row, is_stepped, weights_ptr, firsts_ptr, seconds_ptr, dim, first_dim, columns, state_columns,
    STATES: tl.constexpr,
):  # fmt: skip
    """Weights and states of a row, as far as there are any."""
    present = tl.where(is_stepped, dim, 0)
    weight = prefix_at(weights_ptr + row * dim, columns, present)
    first, second = weight, weight
    if STATES > 0:
        first = prefix_at(firsts_ptr + row * first_dim, state_columns, tl.where(is_stepped, first_dim, 0))
    if STATES > 1:
        second = prefix_at(seconds_ptr + row * dim, columns, present)
    return weight, first, second


@triton.jit
def _step_row(
    row, gradient, weight, first, second, weights_ptr, firsts_ptr, seconds_ptr, dim, first_dim, columns, state_columns,
    learning_rate, weight_decay, eps, first_share, second_beta, second_share, second_correction,
    DECAYS: tl.constexpr, STEP: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Step one row with the sum of its gradients."""
    weight = weight.to(tl.float32)
    if DECAYS:  # zero times an infinite weight would not be zero
        gradient = gradient + weight_decay * weight
    weight, first, second = STEP(
        weight, gradient, first, second, dim,
        learning_rate, eps, first_share, second_beta, second_share, second_correction,
    )  # fmt: skip
    weight = weight.to(weights_ptr.dtype.element_ty)
    # What is computed first is stored last: then the next row waits for all of it at once.
    WEIGHT_FIRST: tl.constexpr = (not DECAYS) & ((STATES < 2) | (weights_ptr.dtype.element_ty == tl.float32))
    if WEIGHT_FIRST:
        tl.store(weights_ptr + row * dim + columns, weight, mask=columns < dim)
    if STATES > 1:
        tl.store(seconds_ptr + row * dim + columns, second, mask=columns < dim)
    if STATES > 0:
        tl.store(firsts_ptr + row * first_dim + state_columns, first, mask=state_columns < first_dim)
    if not WEIGHT_FIRST:
        tl.store(weights_ptr + row * dim + columns, weight, mask=columns < dim)


@triton.jit
def _key_at(position, stop, keys_ptr):
    """The key of a position, and whether it is the last with it; never from ``stop`` on."""
    key = tl.load(keys_ptr + tl.minimum(position, stop - 1))
    next_key = tl.load(keys_ptr + tl.minimum(position + 1, stop - 1))
    return key, (position + 1 == stop) | ((position + 1 < stop) & (next_key != key))


@triton.jit
def _ask(
    position, stop, keys_ptr, key_start, bags_ptr, first_columns_ptr, gradients_ptr, batch_size, num_columns,
    weights_ptr, firsts_ptr, seconds_ptr, dim, first_dim, columns, state_columns, STATES: tl.constexpr,
):  # fmt: skip
    """What a position needs: a gradient, and if it is the last of its row, the row."""
    gradient = _gradient_at(
        position, stop, bags_ptr, first_columns_ptr, gradients_ptr, batch_size, num_columns, dim, columns
    )
    key, is_last = _key_at(position, stop, keys_ptr)
    weight, first, second = _row_of(
        key - key_start, is_last, weights_ptr, firsts_ptr, seconds_ptr, dim, first_dim, columns, state_columns, STATES
    )
    return gradient, weight, first, second


@triton.jit
def _ask_for_four(
    position, stop, keys_ptr, key_start, bags_ptr, first_columns_ptr, gradients_ptr, batch_size, num_columns,
    weights_ptr, firsts_ptr, seconds_ptr, dim, first_dim, columns, state_columns, STATES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """What four positions need, or two of them if a block has two."""
    gradient_0, weight_0, first_0, second_0 = _ask(
        position, stop, keys_ptr, key_start, bags_ptr, first_columns_ptr, gradients_ptr, batch_size, num_columns,
        weights_ptr, firsts_ptr, seconds_ptr, dim, first_dim, columns, state_columns, STATES,
    )  # fmt: skip
    gradient_1, weight_1, first_1, second_1 = _ask(
        position + 1, stop, keys_ptr, key_start, bags_ptr, first_columns_ptr, gradients_ptr, batch_size, num_columns,
        weights_ptr, firsts_ptr, seconds_ptr, dim, first_dim, columns, state_columns, STATES,
    )  # fmt: skip
    gradient_2, weight_2, first_2, second_2 = gradient_0, weight_0, first_0, second_0
    gradient_3, weight_3, first_3, second_3 = gradient_1, weight_1, first_1, second_1
    if ROWS > 2:
        gradient_2, weight_2, first_2, second_2 = _ask(
            position + 2, stop, keys_ptr, key_start, bags_ptr, first_columns_ptr, gradients_ptr, batch_size,
            num_columns, weights_ptr, firsts_ptr, seconds_ptr, dim, first_dim, columns, state_columns, STATES,
        )  # fmt: skip
        gradient_3, weight_3, first_3, second_3 = _ask(
            position + 3, stop, keys_ptr, key_start, bags_ptr, first_columns_ptr, gradients_ptr, batch_size,
            num_columns, weights_ptr, firsts_ptr, seconds_ptr, dim, first_dim, columns, state_columns, STATES,
        )  # fmt: skip
    return (
        gradient_0, gradient_1, gradient_2, gradient_3, weight_0, weight_1, weight_2, weight_3,
        first_0, first_1, first_2, first_3, second_0, second_1, second_2, second_3,
    )  # fmt: skip


@triton.jit
def _of_place(place, value_0, value_2, value_4, value_6, WAYS: tl.constexpr):
    """What was asked for at a place of the block, a multiple of ``WAYS``."""
    value = value_0
    if WAYS == 2:
        if place == 2:
            value = value_2
        if place == 6:
            value = value_6
    if place == 4:
        value = value_4
    return value


@triton.jit
def _take(
    total, position, stop, keys_ptr, key_start, gradient, weight, first, second,
    bags_ptr, lengths_ptr, scales_ptr, weights_ptr, firsts_ptr, seconds_ptr, dim, first_dim, columns, state_columns,
    learning_rate, weight_decay, eps, first_share, second_beta, second_share, second_correction,
    WEIGHTED: tl.constexpr, MEAN: tl.constexpr, DECAYS: tl.constexpr, STEP: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Add the gradient of a position; step the row if it is the last. Returns the sum."""
    total = _plus(total, gradient, position, stop, bags_ptr, lengths_ptr, scales_ptr, WEIGHTED, MEAN)
    key, is_last = _key_at(position, stop, keys_ptr)
    if is_last:
        _step_row(
            key - key_start, total, weight, first, second, weights_ptr, firsts_ptr, seconds_ptr,
            dim, first_dim, columns, state_columns,
            learning_rate, weight_decay, eps, first_share, second_beta, second_share, second_correction,
            DECAYS, STEP, STATES,
        )  # fmt: skip
        total = tl.zeros_like(total)
    return total


@triton.jit
def recfx_fused_step(
    keys_ptr,  # int64 [n], fewer bits on a GPU; ascending: the row, counted through all tables; -1: of no row
    bags_ptr,  # int32 [n], the bag f * B + b of each position
    lengths_ptr,  # int64 [F * B], read if MEAN
    scales_ptr,  # float32 [n], read if WEIGHTED
    gradients_ptr,  # float32 [B, D], of the pooled output
    first_columns_ptr,  # int32 [F], where the features' columns begin in it
    tables_ptr,  # int32 [F], the features' tables
    row_starts_ptr,  # int64 [T], the key of each table's row 0
    dims_ptr,  # int32 [T]
    weights_ptr,  # the first table; the others are reached from it
    new_weights_0_ptr,  # the same memory, four times; likewise below
    new_weights_1_ptr,
    new_weights_2_ptr,
    new_weights_3_ptr,
    weight_starts_ptr,  # int64 [T], elements from the first table to each
    first_ptr,  # float32, the first state of the first table, read if STATES > 0
    new_first_0_ptr,
    new_first_1_ptr,
    new_first_2_ptr,
    new_first_3_ptr,
    first_starts_ptr,  # int64 [T]
    second_ptr,  # float32, the second state of the first table, read if STATES > 1
    new_second_0_ptr,
    new_second_1_ptr,
    new_second_2_ptr,
    new_second_3_ptr,
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
    ROWS: tl.constexpr,  # positions of a block: 8, 4 or 2
    WEIGHTED: tl.constexpr,
    MEAN: tl.constexpr,
    DECAYS: tl.constexpr,  # whether there is any weight decay
    STEP: tl.constexpr,
    STATES: tl.constexpr,  # that the rule has: 0, 1 or 2
    FIRST_IS_PER_ROW: tl.constexpr,
):
    """Step the rows that lie in one chunk; leave the parts of the others."""
    # Places that follow one another without waiting. With two states and weight decay in float32, ascendnpu-ir 1.0.0
    # has too few flags for the stores of four, and lets all units wait for each other.
    FEW_FLAGS: tl.constexpr = DECAYS & (STATES > 1) & (weights_ptr.dtype.element_ty == tl.float32)
    WAYS: tl.constexpr = 2 if (ROWS == 2) | FEW_FLAGS else 4
    program = tl.program_id(0)
    chunk = (num_positions + tl.num_programs(0) - 1) // tl.num_programs(0)
    end = tl.minimum((program + 1) * chunk, num_positions)
    columns = tl.arange(0, BLOCK_D)
    nothing = tl.zeros((BLOCK_D,), dtype=tl.float32)
    no_columns = tl.minimum(num_positions, 0)
    state_columns = tl.arange(0, 1 if FIRST_IS_PER_ROW else BLOCK_D)
    begin = _first_of(0, program * chunk, end, keys_ptr)
    if begin < end:
        whole_begin = begin  # of the positions whose rows lie in the chunk
        if begin > 0:
            whole_begin = _first_of(tl.load(keys_ptr + begin - 1) + 1, begin, end, keys_ptr)
        whole_end = end
        if end < num_positions:
            whole_end = _first_of(tl.load(keys_ptr + end), whole_begin, end, keys_ptr)
        for part in range(0, 2):
            low = begin if part == 0 else whole_end
            stop = whole_begin if part == 0 else end
            if low < stop:
                total = tl.zeros((BLOCK_D,), dtype=tl.float32)
                dim = tl.load(dims_ptr + tl.load(tables_ptr + tl.load(bags_ptr + low) // batch_size))
                for i in range(low, stop, 4 if ROWS > 2 else 2):
                    gradient_0 = _gradient_at(
                        i, stop, bags_ptr, first_columns_ptr, gradients_ptr,
                        batch_size, num_columns, dim, columns,
                    )  # fmt: skip
                    gradient_1 = _gradient_at(
                        i + 1, stop, bags_ptr, first_columns_ptr, gradients_ptr,
                        batch_size, num_columns, dim, columns,
                    )  # fmt: skip
                    gradient_2, gradient_3 = gradient_0, gradient_1
                    if ROWS > 2:
                        gradient_2 = _gradient_at(
                            i + 2, stop, bags_ptr, first_columns_ptr, gradients_ptr,
                            batch_size, num_columns, dim, columns,
                        )  # fmt: skip
                        gradient_3 = _gradient_at(
                            i + 3, stop, bags_ptr, first_columns_ptr, gradients_ptr,
                            batch_size, num_columns, dim, columns,
                        )  # fmt: skip
                    total = _plus(total, gradient_0, i, stop, bags_ptr, lengths_ptr, scales_ptr, WEIGHTED, MEAN)
                    total = _plus(total, gradient_1, i + 1, stop, bags_ptr, lengths_ptr, scales_ptr, WEIGHTED, MEAN)
                    if ROWS > 2:
                        total = _plus(total, gradient_2, i + 2, stop, bags_ptr, lengths_ptr, scales_ptr, WEIGHTED, MEAN)
                        total = _plus(total, gradient_3, i + 3, stop, bags_ptr, lengths_ptr, scales_ptr, WEIGHTED, MEAN)
                tl.store(parts_ptr + (2 * program + part) * BLOCK_D + columns, total, mask=columns < dim)
        if whole_begin < whole_end:
            first_table = tl.load(tables_ptr + tl.load(bags_ptr + whole_begin) // batch_size)
            last_table = tl.load(tables_ptr + tl.load(bags_ptr + whole_end - 1) // batch_size)
            for table in range(first_table, last_table + 1):
                stop = whole_end
                if table < last_table:
                    stop = _first_of(tl.load(row_starts_ptr + table + 1), whole_begin, whole_end, keys_ptr)
                dim = tl.load(dims_ptr + table)
                first_dim = 1 if FIRST_IS_PER_ROW else dim
                key_start = tl.load(row_starts_ptr + table)
                weight_start = tl.load(weight_starts_ptr + table)
                first_start = tl.load(first_starts_ptr + table)
                second_start = tl.load(second_starts_ptr + table)
                total = tl.zeros((BLOCK_D,), dtype=tl.float32)
                for i in range(whole_begin, stop, ROWS):
                    (
                        gradient_0, gradient_1, gradient_2, gradient_3, weight_0, weight_1, weight_2, weight_3,
                        first_0, first_1, first_2, first_3, second_0, second_1, second_2, second_3,
                    ) = _ask_for_four(
                        i, stop, keys_ptr, key_start, bags_ptr, first_columns_ptr, gradients_ptr, batch_size,
                        num_columns, weights_ptr + weight_start, first_ptr + first_start, second_ptr + second_start,
                        dim, first_dim, columns, state_columns, STATES, ROWS,
                    )  # fmt: skip
                    gradient_4, gradient_5, gradient_6, gradient_7 = gradient_0, gradient_1, gradient_2, gradient_3
                    weight_4, weight_5, weight_6, weight_7 = weight_0, weight_1, weight_2, weight_3
                    first_4, first_5, first_6, first_7 = first_0, first_1, first_2, first_3
                    second_4, second_5, second_6, second_7 = second_0, second_1, second_2, second_3
                    if ROWS > 4:
                        (
                            gradient_4, gradient_5, gradient_6, gradient_7, weight_4, weight_5, weight_6, weight_7,
                            first_4, first_5, first_6, first_7, second_4, second_5, second_6, second_7,
                        ) = _ask_for_four(
                            i + 4, stop, keys_ptr, key_start, bags_ptr, first_columns_ptr, gradients_ptr, batch_size,
                            num_columns, weights_ptr + weight_start, first_ptr + first_start, second_ptr + second_start,
                            dim, first_dim, columns, state_columns, STATES, ROWS,
                        )  # fmt: skip
                    for at in range(i, tl.minimum(i + ROWS, stop), WAYS):
                        place = at - i
                        tl.store(parts_ptr + columns, nothing, mask=columns < no_columns)
                        total = _take(
                            total, at, stop, keys_ptr, key_start,
                            _of_place(place, gradient_0, gradient_2, gradient_4, gradient_6, WAYS),
                            _of_place(place, weight_0, weight_2, weight_4, weight_6, WAYS),
                            _of_place(place, first_0, first_2, first_4, first_6, WAYS),
                            _of_place(place, second_0, second_2, second_4, second_6, WAYS),
                            bags_ptr, lengths_ptr, scales_ptr, new_weights_0_ptr + weight_start,
                            new_first_0_ptr + first_start, new_second_0_ptr + second_start,
                            dim, first_dim, columns, state_columns, learning_rate, weight_decay, eps, first_share,
                            second_beta, second_share, second_correction, WEIGHTED, MEAN, DECAYS, STEP, STATES,
                        )  # fmt: skip
                        total = _take(
                            total, at + 1, stop, keys_ptr, key_start,
                            _of_place(place, gradient_1, gradient_3, gradient_5, gradient_7, WAYS),
                            _of_place(place, weight_1, weight_3, weight_5, weight_7, WAYS),
                            _of_place(place, first_1, first_3, first_5, first_7, WAYS),
                            _of_place(place, second_1, second_3, second_5, second_7, WAYS),
                            bags_ptr, lengths_ptr, scales_ptr, new_weights_1_ptr + weight_start,
                            new_first_1_ptr + first_start, new_second_1_ptr + second_start,
                            dim, first_dim, columns, state_columns, learning_rate, weight_decay, eps, first_share,
                            second_beta, second_share, second_correction, WEIGHTED, MEAN, DECAYS, STEP, STATES,
                        )  # fmt: skip
                        if WAYS > 2:
                            total = _take(
                                total, at + 2, stop, keys_ptr, key_start,
                                _of_place(place, gradient_2, gradient_2, gradient_6, gradient_6, WAYS),
                                _of_place(place, weight_2, weight_2, weight_6, weight_6, WAYS),
                                _of_place(place, first_2, first_2, first_6, first_6, WAYS),
                                _of_place(place, second_2, second_2, second_6, second_6, WAYS),
                                bags_ptr, lengths_ptr, scales_ptr, new_weights_2_ptr + weight_start,
                                new_first_2_ptr + first_start, new_second_2_ptr + second_start,
                                dim, first_dim, columns, state_columns, learning_rate, weight_decay, eps, first_share,
                                second_beta, second_share, second_correction, WEIGHTED, MEAN, DECAYS, STEP, STATES,
                            )  # fmt: skip
                            total = _take(
                                total, at + 3, stop, keys_ptr, key_start,
                                _of_place(place, gradient_3, gradient_3, gradient_7, gradient_7, WAYS),
                                _of_place(place, weight_3, weight_3, weight_7, weight_7, WAYS),
                                _of_place(place, first_3, first_3, first_7, first_7, WAYS),
                                _of_place(place, second_3, second_3, second_7, second_7, WAYS),
                                bags_ptr, lengths_ptr, scales_ptr, new_weights_3_ptr + weight_start,
                                new_first_3_ptr + first_start, new_second_3_ptr + second_start,
                                dim, first_dim, columns, state_columns, learning_rate, weight_decay, eps, first_share,
                                second_beta, second_share, second_correction, WEIGHTED, MEAN, DECAYS, STEP, STATES,
                            )  # fmt: skip
                whole_begin = stop


@triton.jit
def recfx_fused_step_of_borders(
    keys_ptr, bags_ptr, tables_ptr, row_starts_ptr, dims_ptr, weights_ptr, new_weights_ptr, weight_starts_ptr,
    first_ptr, new_first_ptr, first_starts_ptr, second_ptr, new_second_ptr, second_starts_ptr,
    parts_ptr, num_positions, num_chunks, batch_size,
    learning_rate, weight_decay, eps, first_share, second_beta, second_share, second_correction,
    BLOCK_D: tl.constexpr, DECAYS: tl.constexpr, STEP: tl.constexpr, STATES: tl.constexpr,
    FIRST_IS_PER_ROW: tl.constexpr,
):  # fmt: skip
    """Step the rows whose positions lie in several chunks; parameters as in the first kernel, with its chunks."""
    columns = tl.arange(0, BLOCK_D)
    state_columns = tl.arange(0, 1 if FIRST_IS_PER_ROW else BLOCK_D)
    chunk = (num_positions + num_chunks - 1) // num_chunks
    for first_chunk in range(tl.program_id(0), num_chunks - 1, tl.num_programs(0)):
        begin = first_chunk * chunk
        end = begin + chunk
        if end < num_positions:
            key = tl.load(keys_ptr + end - 1)
            goes_on = tl.load(keys_ptr + end) == key
            began_earlier = 0
            if begin > 0:
                began_earlier = (tl.load(keys_ptr + begin - 1) == key).to(tl.int32)
            if goes_on & (began_earlier == 0) & (key >= 0):
                total = tl.load(parts_ptr + (2 * first_chunk + 1) * BLOCK_D + columns)
                last = first_chunk + 1
                more = 1
                while more == 1:
                    following = (last + 1) * chunk
                    more = 0
                    if following < num_positions:
                        more = (tl.load(keys_ptr + following) == key).to(tl.int32)
                    last += 1
                for other in range(first_chunk + 1, last):
                    total += tl.load(parts_ptr + (2 * other) * BLOCK_D + columns)
                table = tl.load(tables_ptr + tl.load(bags_ptr + end - 1) // batch_size)
                dim = tl.load(dims_ptr + table)
                first_dim = 1 if FIRST_IS_PER_ROW else dim
                row = key - tl.load(row_starts_ptr + table)
                weight_start = tl.load(weight_starts_ptr + table)
                first_start = tl.load(first_starts_ptr + table)
                second_start = tl.load(second_starts_ptr + table)
                weight, first, second = _row_of(
                    row, key >= 0, weights_ptr + weight_start, first_ptr + first_start, second_ptr + second_start,
                    dim, first_dim, columns, state_columns, STATES,
                )  # fmt: skip
                _step_row(
                    row, total, weight, first, second,
                    new_weights_ptr + weight_start, new_first_ptr + first_start, new_second_ptr + second_start,
                    dim, first_dim, columns, state_columns,
                    learning_rate, weight_decay, eps, first_share, second_beta, second_share, second_correction,
                    DECAYS, STEP, STATES,
                )  # fmt: skip
