"""``find_rows_triton.py`` for a GPU: a lane has one id, and lanes probe on together until all are done."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.build.segments_triton import segments_of
from recfx.kernels.index.find_rows_triton import (
    DENSE_ROWS,
    FIELDS,
    MIXED_NEXT_SEED,
    MIXED_SEED,
    ROW_BEGIN,
    ROWS,
    SHARE_BUCKETS,
    SIDE_START,
    SLOT_MASK,
    SLOTS_START,
    TABLE_ROWS,
)
from recfx.kernels.index.mix64_triton import mix63


@triton.jit
def _rows_in_slots(keys, asked, slots_ptr, slot_mask):
    """Linear probing from murmur3's finalizer, as in ``slot_table.py``; -1 where nothing is ``asked`` or found."""
    k = (keys ^ ((keys >> 33) & 0x7FFFFFFF)) * -49064778989728563
    k = (k ^ ((k >> 33) & 0x7FFFFFFF)) * -4265267296055464877
    slot = (k ^ ((k >> 33) & 0x7FFFFFFF)) & slot_mask
    found = tl.load(slots_ptr + 2 * slot, mask=asked, other=-1)
    going = asked & (found != keys) & (found != -1)
    while tl.max(going.to(tl.int32), 0) > 0:
        slot = tl.where(going, (slot + 1) & slot_mask, slot)
        found = tl.where(going, tl.load(slots_ptr + 2 * slot, mask=going, other=-1), found)
        going = going & (found != keys) & (found != -1)
    return tl.load(slots_ptr + 2 * slot + 1, mask=asked & (found == keys), other=-1)


@triton.jit
def _shared_rows(keys, asked, index_ptr):
    """The row of this slice that an id without one of its own reads, -1 if there is none; see ``buckets.py``."""
    share = tl.load(index_ptr + SHARE_BUCKETS, mask=asked, other=0)
    dense_rows = tl.load(index_ptr + DENSE_ROWS, mask=asked, other=0)
    index_rows = tl.load(index_ptr + TABLE_ROWS, mask=asked, other=1) - dense_rows
    buckets = tl.maximum(tl.where(share < 0, -share, share), 1)
    bucket = mix63(keys, tl.load(index_ptr + MIXED_SEED, mask=asked, other=0)) % buckets
    begin = dense_rows + bucket * index_rows // buckets
    rows = tl.maximum(dense_rows + (bucket + 1) * index_rows // buckets - begin, 1)
    place = mix63(keys, tl.load(index_ptr + MIXED_NEXT_SEED, mask=asked, other=0)) % rows
    row = begin + tl.where(share < 0, rows - 1, place) - tl.load(index_ptr + ROW_BEGIN, mask=asked, other=0)
    is_shared = asked & (share != 0) & ((keys < 0) | (keys >= dense_rows))
    return tl.where(is_shared & (row >= 0) & (row < tl.load(index_ptr + ROWS, mask=asked, other=0)), row, -1)


@triton.jit
def recfx_find_rows_on_gpu(
    ids_ptr,  # int64 [n], ordered by table
    table_ends_ptr,  # int64 [tables], the end of each table's ids
    slots_ptr,  # int64, the first table's slots; the others are reached from it
    side_rows_ptr,  # int64, the first table's row of id -1
    indexes_ptr,  # int64 [tables, FIELDS]
    rows_ptr,  # int64 [n], -1 where an id has no row
    absent_ptr,  # int32 [tables], zeros: how many ids have no row of their own
    num_ids,
    num_tables,
    BLOCK: tl.constexpr,  # ids of a program
):
    """Find the row of each id."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    inside = place < num_ids
    keys = tl.load(ids_ptr + place, mask=inside, other=0)
    table = segments_of(first, place, inside, table_ends_ptr, num_tables)
    index_ptr = indexes_ptr + table * FIELDS
    slot_mask = tl.load(index_ptr + SLOT_MASK, mask=inside, other=-1)
    row_begin = tl.load(index_ptr + ROW_BEGIN, mask=inside, other=0)
    dense = tl.load(index_ptr + DENSE_ROWS, mask=inside, other=0) - row_begin
    dense = tl.minimum(dense, tl.load(index_ptr + ROWS, mask=inside, other=0))
    is_indexed = inside & (slot_mask >= 0)
    is_hashed = is_indexed & ((keys < row_begin) | (keys - row_begin >= dense))
    at_side = is_hashed & (keys == -1)
    side_row = tl.load(side_rows_ptr + tl.load(index_ptr + SIDE_START, mask=at_side, other=0), mask=at_side, other=-1)
    start = tl.load(index_ptr + SLOTS_START, mask=is_hashed, other=0)
    own = tl.where(at_side, side_row, _rows_in_slots(keys, is_hashed & (keys != -1), slots_ptr + start, slot_mask))
    is_absent = is_hashed & (own < 0)
    if tl.max(is_absent.to(tl.int32), 0) > 0:
        tl.atomic_add(absent_ptr + table, 1, mask=is_absent)
        own = tl.where(is_absent, _shared_rows(keys, is_absent, index_ptr), own)
    rows = tl.where(is_hashed, own, tl.where(is_indexed, keys - row_begin, keys))
    tl.store(rows_ptr + place, rows, mask=inside)
