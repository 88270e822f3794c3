"""``step_order.py`` in Triton: the digits by which positions are sorted.

A program takes a run of positions, feature by feature. All arithmetic of vectors is int32 without comparisons, which
Ascend's compiler keeps as vectors.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

POSITIONS: tl.constexpr = tl.constexpr(1024)
"""How many are computed at once."""


@triton.jit
def recfx_step_digits(
    rows_ptr,  # int64 [n]
    offsets_ptr,  # int64 [F * B + 1]
    bases_ptr,  # int64 [F], the key of row 0 of each feature's table; -1 if it is not stepped
    low_ptr,  # float32 [n], written: the low 24 bits of the keys
    high_ptr,  # float32 [n], written: the others
    num_positions,  # n
    num_features,  # F
    batch_size,  # B
    per_program,  # a multiple of 16: programs write to different lines of the memory
):
    """The key of each position in digits of 24 bits, which float32 holds exactly."""
    lanes = tl.arange(0, POSITIONS)
    begin = tl.program_id(0) * per_program
    end = tl.minimum(begin + per_program, num_positions)
    feature = 0  # the last one that begins at `begin` or before
    beyond = num_features
    while beyond - feature > 1:
        middle = (feature + beyond) // 2
        if tl.load(offsets_ptr + middle * batch_size) <= begin:
            feature = middle
        else:
            beyond = middle
    while begin < end:
        feature_end = tl.cast(tl.load(offsets_ptr + (feature + 1) * batch_size), tl.int32)
        stop = tl.minimum(feature_end, end)
        base = tl.load(bases_ptr + feature)
        is_stepped = tl.cast(tl.minimum(base, 0), tl.int32) + 1
        base_low = tl.cast(base & 0xFFFFFF, tl.int32)
        base_high = tl.cast((base >> 24) & 0xFFFFFFFFFF, tl.int32)
        for start in range(begin, stop, POSITIONS):
            mask = lanes < stop - start
            row = tl.load(rows_ptr + start + lanes, mask=mask, other=0).to(tl.int32)
            present = (tl.maximum(tl.minimum(row, 0), -1) + 1) * is_stepped  # 1, or 0
            low = (row & 0xFFFFFF) + base_low
            high = ((row & 0x7F000000) >> 24) + base_high + ((low & 0x1000000) >> 24)
            low = (low & 0xFFFFFF) * present + present - 1
            tl.store(low_ptr + start + lanes, low.to(tl.float32), mask=mask)
            tl.store(high_ptr + start + lanes, (high * present).to(tl.float32), mask=mask)
        begin = stop
        feature += 1


@triton.jit
def recfx_step_digits_on_gpu(
    rows_ptr,  # int64 [n]
    offsets_ptr,  # int64 [F * B + 1]
    bases_ptr,  # int64 [F], the key of row 0 of each feature's table; -1 if it is not stepped
    low_ptr,  # int16 or int32 [n], written: the low BITS bits of the keys
    high_ptr,  # int8 or int16 [n], written if WIDE: the others
    bags_ptr,  # int32 [n], written: the bag f * B + b
    num_positions,  # n
    num_features,  # F
    batch_size,  # B
    BITS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,  # positions of a program
):
    """The bag of each position, and its key in the integers by which a GPU sorts; a lane has one position."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_positions
    bag = tl.zeros((BLOCK,), dtype=tl.int32)  # the number of bags that end at the position or before
    last = bag + num_features * batch_size - 1
    while tl.max(last - bag, 0) > 0:
        middle = bag + (last - bag) // 2
        is_behind = inside & (bag < last) & (tl.load(offsets_ptr + 1 + middle) <= place)
        bag = tl.where(is_behind, middle + 1, bag)
        last = tl.where(is_behind, last, middle)
    row = tl.load(rows_ptr + place, mask=inside, other=-1)
    base = tl.load(bases_ptr + bag // batch_size)
    key = base + row
    is_stepped = (row >= 0) & (base >= 0)
    low = tl.where(is_stepped, key & ((1 << BITS) - 1), -1)
    tl.store(low_ptr + place, low.to(low_ptr.dtype.element_ty), mask=inside)
    tl.store(bags_ptr + place, bag, mask=inside)
    if WIDE:
        tl.store(high_ptr + place, tl.where(is_stepped, key >> BITS, 0).to(high_ptr.dtype.element_ty), mask=inside)
