"""Finding ids in indexes, in Triton: only reads, so that evaluation and serving need not go through the host.

Ids are scalars throughout, see ``mix64_triton.py``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.index.mix64_triton import mix63

# What an index is for the kernel: int64 [tables, FIELDS].
SLOTS_START = tl.constexpr(0)  # elements from the first table's slots to this one's
SLOT_MASK = tl.constexpr(1)  # slots - 1; -1: the table has no index, its ids are its rows
SIDE_START = tl.constexpr(2)  # elements from the first table's row of id -1 to this one's
ROW_BEGIN = tl.constexpr(3)  # the table's row at which this slice of it begins
ROWS = tl.constexpr(4)  # of this slice
DENSE_ROWS = tl.constexpr(5)  # of the table
SHARE_BUCKETS = tl.constexpr(6)  # 0: an id without a row of its own has none
TABLE_ROWS = tl.constexpr(7)
MIXED_SEED = tl.constexpr(8)  # mix64 of the seed, 0 for seed 0
MIXED_NEXT_SEED = tl.constexpr(9)  # of seed + 1
FIELDS = tl.constexpr(10)


@triton.jit
def _row_in_slots(key, slots_ptr, slot_mask):
    """Linear probing from murmur3's finalizer, as in ``slot_table.py``."""
    k = (key ^ ((key >> 33) & 0x7FFFFFFF)) * -49064778989728563
    k = (k ^ ((k >> 33) & 0x7FFFFFFF)) * -4265267296055464877
    slot = (k ^ ((k >> 33) & 0x7FFFFFFF)) & slot_mask
    key_in_slot = tl.load(slots_ptr + 2 * slot)
    while (key_in_slot != key) & (key_in_slot != -1):
        slot = (slot + 1) & slot_mask
        key_in_slot = tl.load(slots_ptr + 2 * slot)
    row = tl.load(slots_ptr + 2 * slot + 1)
    return tl.where(key_in_slot == key, row, -1)


@triton.jit
def _shared_row(key, index_ptr):
    """The row of this slice that an id without one of its own reads, -1 if there is none; see ``buckets.py``."""
    share = tl.load(index_ptr + SHARE_BUCKETS)
    buckets = tl.where(share < 0, -share, share)
    dense_rows = tl.load(index_ptr + DENSE_ROWS)
    row = tl.full((), -1, tl.int64)
    if (buckets > 0) & ((key < 0) | (key >= dense_rows)):
        index_rows = tl.load(index_ptr + TABLE_ROWS) - dense_rows
        bucket = mix63(key, tl.load(index_ptr + MIXED_SEED)) % buckets
        begin = dense_rows + bucket * index_rows // buckets
        end = dense_rows + (bucket + 1) * index_rows // buckets
        place = tl.where(share < 0, end - begin - 1, mix63(key, tl.load(index_ptr + MIXED_NEXT_SEED)) % (end - begin))
        row = begin + place - tl.load(index_ptr + ROW_BEGIN)
        if (row < 0) | (row >= tl.load(index_ptr + ROWS)):
            row = tl.full((), -1, tl.int64)
    return row


@triton.jit
def recfx_find_rows(
    ids_ptr,  # int64 [n], ordered by table
    table_ends_ptr,  # int64 [tables], the end of each table's ids
    slots_ptr,  # int64, the first table's slots; the others are reached from it
    side_rows_ptr,  # int64, the first table's row of id -1
    indexes_ptr,  # int64 [tables, FIELDS]
    rows_ptr,  # int64 [n], -1 where an id has no row
    absent_ptr,  # int32 [programs, tables], how many ids have no row of their own
    num_ids,
    num_tables,
    ids_per_program,  # a multiple of 8: programs write to different lines of the memory
):
    """Find the row of each id, a run of consecutive ids per program."""
    program = tl.program_id(0)
    begin = program * ids_per_program
    end = tl.minimum(begin + ids_per_program, num_ids)
    table = 0
    absent = 0
    for position in range(begin, end):
        table_end = tl.load(table_ends_ptr + table)
        while position >= table_end:
            tl.store(absent_ptr + program * num_tables + table, absent)
            absent = 0
            table += 1
            table_end = tl.load(table_ends_ptr + table)
        key = tl.load(ids_ptr + position)
        index_ptr = indexes_ptr + table * FIELDS
        slot_mask = tl.load(index_ptr + SLOT_MASK)
        row_begin = tl.load(index_ptr + ROW_BEGIN)
        rows = tl.load(index_ptr + ROWS)
        row = key
        if slot_mask >= 0:
            dense = tl.minimum(tl.load(index_ptr + DENSE_ROWS) - row_begin, rows)
            row = key - row_begin
            if (key < row_begin) | (row >= dense):
                if key == -1:
                    row = tl.load(side_rows_ptr + tl.load(index_ptr + SIDE_START))
                else:
                    row = _row_in_slots(key, slots_ptr + tl.load(index_ptr + SLOTS_START), slot_mask)
                if row < 0:
                    absent += 1
                    row = _shared_row(key, index_ptr)
        tl.store(rows_ptr + position, row)
    tl.store(absent_ptr + program * num_tables + table, absent)
