"""``bag_offsets.py`` in Triton: where bags begin, and whether lengths and ids may be wrong.

What is ordinary is computed in int32 and checked by the least and the largest number, which Ascend's compiler keeps as
vectors. A batch that is not ordinary is reported, and the reference in ATen finds out what is wrong with it, if any.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

LARGEST: tl.constexpr = tl.constexpr(1 << 30)
"""The largest number that is ordinary: sums of two are int32."""
LANES: tl.constexpr = tl.constexpr(512)
"""How many bags or ids are read at once."""


@triton.jit
def recfx_bag_offsets(
    bags_ptr,  # int64 or int32: lengths [bags], or offsets [bags + 1]
    ends_ptr,  # int32 [bags], the sums of the lengths, which may have wrapped around; not read if ARE_OFFSETS
    ids_ptr,  # int64 or int32 [n]
    first_bags_ptr,  # int64 [F + 1], where each key's bags begin
    limits_ptr,  # int64 [F], at most LARGEST: ids must be below; -1: any id is valid
    offsets_ptr,  # int64 [bags + 1], written
    reports_ptr,  # int64 [F + 1 + programs], written: where each key's ids begin, and 1 if something may be wrong
    num_bags,
    num_ids,  # n, at most LARGEST
    num_keys,  # F
    bags_per_program,
    ids_per_program,
    ARE_OFFSETS: tl.constexpr,
):
    """Each program takes a run of bags, and one of ids. Whatever the lengths are, nothing outside of them is read."""
    program = tl.program_id(0)
    wrong = _copy_offsets(
        bags_ptr, ends_ptr, offsets_ptr, program * bags_per_program, bags_per_program, num_bags, num_ids, ARE_OFFSETS
    )
    wrong = wrong.to(tl.int32)  # loops carry numbers: with a boolean, one version of Ascend's compiler may crash
    begin = tl.minimum(program * ids_per_program, num_ids)
    end = tl.minimum(begin + ids_per_program, num_ids)
    key = 0  # the last one that begins at `begin` or before
    beyond = num_keys
    while beyond - key > 1:
        middle = (key + beyond) // 2
        if _border(bags_ptr, ends_ptr, first_bags_ptr, middle, ARE_OFFSETS) <= begin:
            key = middle
        else:
            beyond = middle
    while (key < num_keys) & (begin < end):
        last = _border(bags_ptr, ends_ptr, first_bags_ptr, key + 1, ARE_OFFSETS)
        stop = tl.cast(tl.minimum(tl.maximum(last, begin), end), tl.int32)
        limit = tl.load(limits_ptr + key)
        if limit >= 0:
            wrong = wrong | _some_are_beyond(ids_ptr, begin, stop, limit).to(tl.int32)
        begin = stop
        key += 1
    tl.store(reports_ptr + num_keys + 1 + program, wrong.to(tl.int64))
    if program == 0:
        tl.store(offsets_ptr, tl.full((), 0, tl.int64))
        for border in range(0, num_keys + 1):
            tl.store(reports_ptr + border, _border(bags_ptr, ends_ptr, first_bags_ptr, border, ARE_OFFSETS))


@triton.jit
def _copy_offsets(
    bags_ptr, ends_ptr, offsets_ptr, begin, bags_per_program, num_bags, num_ids, ARE_OFFSETS: tl.constexpr
):  # fmt: skip
    """Write the offsets of a run of bags; whether some may be wrong."""
    lanes = tl.arange(0, LANES)
    begin = tl.minimum(begin, num_bags)
    end = tl.minimum(begin + bags_per_program, num_bags)
    least = tl.zeros((LANES,), dtype=tl.float32)
    largest = tl.zeros((LANES,), dtype=tl.float32)
    lowest = tl.zeros((LANES,), dtype=tl.int32)
    highest = tl.zeros((LANES,), dtype=tl.int32)
    last = 0
    if ARE_OFFSETS:
        first = tl.load(bags_ptr).to(tl.int32)
        last = tl.load(bags_ptr + num_bags).to(tl.int32) - first
    else:
        last = tl.load(ends_ptr + num_bags - 1)
    for start in range(begin, end, LANES):
        mask = lanes < end - start
        given = tl.load(bags_ptr + start + lanes, mask=mask, other=0)
        least = tl.minimum(least, given.to(tl.float32))
        largest = tl.maximum(largest, given.to(tl.float32))
        if ARE_OFFSETS:
            following = tl.load(bags_ptr + start + 1 + lanes, mask=mask, other=0)
            least = tl.minimum(least, following.to(tl.float32))
            largest = tl.maximum(largest, following.to(tl.float32))
            lowest = tl.minimum(lowest, following.to(tl.int32) - given.to(tl.int32))
            ends = following.to(tl.int32) - first
        else:
            ends = tl.load(ends_ptr + start + lanes, mask=mask, other=0)
            lowest = tl.minimum(lowest, ends)
            highest = tl.maximum(highest, ends)
        tl.store(offsets_ptr + 1 + start + lanes, ends.to(tl.int64), mask=mask)
    wrong = (tl.min(least, axis=0) < 0) | (tl.max(largest, axis=0) > LARGEST) | (tl.min(lowest, axis=0) < 0)
    return wrong | (tl.max(highest, axis=0) > num_ids) | (last != num_ids)


@triton.jit
def _border(bags_ptr, ends_ptr, first_bags_ptr, key, ARE_OFFSETS: tl.constexpr):
    """Where the ids of a key begin, int64; anything if lengths are wrong."""
    bag = tl.load(first_bags_ptr + key)
    border = tl.full((), 0, tl.int64)
    if ARE_OFFSETS:
        border += tl.load(bags_ptr + bag) - tl.load(bags_ptr)
    elif bag > 0:
        border += tl.load(ends_ptr + bag - 1)
    return border


@triton.jit
def _some_are_beyond(ids_ptr, begin, end, limit):
    """Whether some of these ids may not be in ``[0, limit)``."""
    lanes = tl.arange(0, LANES)
    least = tl.zeros((LANES,), dtype=tl.float32)
    largest = tl.zeros((LANES,), dtype=tl.float32)
    highest = tl.zeros((LANES,), dtype=tl.int32)
    for start in range(begin, end, LANES):
        ids = tl.load(ids_ptr + start + lanes, mask=lanes < end - start, other=0)
        least = tl.minimum(least, ids.to(tl.float32))
        largest = tl.maximum(largest, ids.to(tl.float32))
        highest = tl.maximum(highest, ids.to(tl.int32))
    wrong = (tl.min(least, axis=0) < 0) | (tl.max(largest, axis=0) > LARGEST)
    return wrong | (tl.max(highest, axis=0) >= limit)
