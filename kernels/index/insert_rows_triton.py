"""``insert_rows.py`` in Triton, in six kinds of launches; between them, the ids without a row are sorted by ATen.

1.  ``recfx_find_in_groups`` finds the rows that ids have, and counts the ids that have none (the absent ones).
2.  ``recfx_collect_absent`` lists these in their order, with the hash and the bucket of each.
3.  In the order of their hashes, equal ids are neighbours: ``recfx_first_sightings`` tells the first one from the rest.
4.  In the order of buckets, ``recfx_plan_rows`` chooses the row of each of them, and ``recfx_take_rows`` takes it.
5.  In the order of hashes, which is that of home groups, ``recfx_place_ids`` fills slots, and answers every absent id.

Every value has one program that writes it: there are no atomics. And no launch reads what it has itself written, since
Ascend reads scalars through a cache that knows nothing of its own vector cores' copies to memory. Sorted ids need no
more: whoever takes them in order only ever goes on to higher rows of a bucket, and to later slots of a table.

Ids are scalars throughout, see ``mix64_triton.py``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

from recfx.kernels.index.mix64_triton import mix63

# What an index is for the kernels: int64 [tables, FIELDS].
SLOTS_START = tl.constexpr(0)  # elements of the slot groups before those of the table
SLOTS = tl.constexpr(1)  # four per group; 0: the table has no index, its ids are its rows
HASH_XOR = tl.constexpr(2)  # of the seeded hash, see slot_groups.py
HASH_FACTOR = tl.constexpr(3)
DENSE_ROWS = tl.constexpr(4)
ROWS = tl.constexpr(5)
ROWS_START = tl.constexpr(6)  # the rows of the tables before
BUCKETS = tl.constexpr(7)
BUCKETS_START = tl.constexpr(8)  # the buckets of the tables before
MIXED_SEED = tl.constexpr(9)  # mix64 of the seed, 0 for seed 0
MIXED_NEXT_SEED = tl.constexpr(10)  # of seed + 1
SHARES = tl.constexpr(11)  # 1: an id whose bucket is full shares a row; 0: no batch may have such an id
MARKS_NEW = tl.constexpr(12)
FIELDS = tl.constexpr(13)


@triton.jit
def _hash(key, facts_ptr):
    """``slot_groups.seeded_hash``."""
    k = key ^ tl.load(facts_ptr + HASH_XOR)
    k = (k ^ ((k >> 33) & 0x7FFFFFFF)) * -49064778989728563
    return (k ^ ((k >> 33) & 0x7FFFFFFF)) * tl.load(facts_ptr + HASH_FACTOR)


@triton.jit
def _home_slot(key, slots, facts_ptr):
    """The first slot of the id's home group."""
    return ((((_hash(key, facts_ptr) >> 32) & 0xFFFFFFFF) * (slots // 4)) >> 32) * 4


@triton.jit
def _element(slot):
    """Where a slot's id is among the elements of the groups; its row is four further on."""
    return slot + (slot & -4)


@triton.jit
def _bucket_begin(bucket, facts_ptr):
    dense_rows = tl.load(facts_ptr + DENSE_ROWS)
    return dense_rows + bucket * (tl.load(facts_ptr + ROWS) - dense_rows) // tl.load(facts_ptr + BUCKETS)


@triton.jit
def recfx_find_in_groups(
    ids_ptr,  # int64 [n], ordered by table
    table_ends_ptr,  # int64 [tables], the end of each table's ids
    slots_ptr,  # int64, the slot groups of all tables
    side_rows_ptr,  # int64 [tables], the row of id -1
    facts_ptr,  # int64 [tables, FIELDS]
    rows_ptr,  # int64 [n], -1 for absent ids
    absent_ptr,  # int32 [programs, tables], zeros; how many ids are absent
    num_ids,
    num_tables,
    ids_per_program,  # a multiple of 8: programs write to different lines of the memory
):
    """Find the row of each id, a run of consecutive ids per program. Slots are filled from the home group's first."""
    program = tl.program_id(0)
    begin = program * ids_per_program
    table = 0
    absent = 0
    for position in range(begin, tl.minimum(begin + ids_per_program, num_ids)):
        table_end = tl.load(table_ends_ptr + table)
        while position >= table_end:
            tl.store(absent_ptr + program * num_tables + table, absent)
            absent = 0
            table += 1
            table_end = tl.load(table_ends_ptr + table)
        key = tl.load(ids_ptr + position)
        table_facts_ptr = facts_ptr + table * FIELDS
        slots = tl.load(table_facts_ptr + SLOTS)
        row = key
        if (slots > 0) & ((key < 0) | (key >= tl.load(table_facts_ptr + DENSE_ROWS))):
            if key == -1:
                row = tl.load(side_rows_ptr + table)
            else:
                own_slots_ptr = slots_ptr + tl.load(table_facts_ptr + SLOTS_START)
                slot = _home_slot(key, slots, table_facts_ptr)
                held = tl.load(own_slots_ptr + _element(slot))
                while (held != key) & (held != -1):
                    slot += 1
                    if slot == slots:
                        slot = tl.full((), 0, tl.int64)
                    held = tl.load(own_slots_ptr + _element(slot))
                row = tl.where(held == key, tl.load(own_slots_ptr + _element(slot) + 4), -1)
            if row < 0:
                absent += 1
        tl.store(rows_ptr + position, row)
    tl.store(absent_ptr + program * num_tables + table, absent)


@triton.jit
def recfx_collect_absent(
    ids_ptr,  # int64 [n]
    table_ends_ptr,  # int64 [tables]
    facts_ptr,  # int64 [tables, FIELDS]
    rows_ptr,  # int64 [n], from recfx_find_in_groups
    firsts_ptr,  # int32 [programs], how many absent ids are before those of each program
    positions_ptr,  # int32 [absent], where they are among all ids
    digits_ptr,  # int32 [4, absent], of (table, hash), the lowest digit first; each below 2 ** 24
    buckets_ptr,  # int32 [absent], among those of all tables
    num_ids,
    num_absent,
    ids_per_program,  # as for recfx_find_in_groups
):
    """List the absent ids, in order."""
    begin = tl.program_id(0) * ids_per_program
    place = tl.load(firsts_ptr + tl.program_id(0))
    table = 0
    for position in range(begin, tl.minimum(begin + ids_per_program, num_ids)):
        while position >= tl.load(table_ends_ptr + table):
            table += 1
        table_facts_ptr = facts_ptr + table * FIELDS
        if (tl.load(rows_ptr + position) == -1) & (tl.load(table_facts_ptr + SLOTS) > 0):
            key = tl.load(ids_ptr + position)
            hashed = _hash(key, table_facts_ptr)
            bucket = mix63(key, tl.load(table_facts_ptr + MIXED_SEED)) % tl.load(table_facts_ptr + BUCKETS)
            tl.store(positions_ptr + place, position)
            tl.store(digits_ptr + place, (hashed & 0x3FFFFF).to(tl.int32))
            tl.store(digits_ptr + num_absent + place, ((hashed >> 22) & 0x1FFFFF).to(tl.int32))
            tl.store(digits_ptr + 2 * num_absent + place, ((hashed >> 43) & 0x1FFFFF).to(tl.int32))
            tl.store(digits_ptr + 3 * num_absent + place, table)
            tl.store(buckets_ptr + place, (tl.load(table_facts_ptr + BUCKETS_START) + bucket).to(tl.int32))
            place += 1


@triton.jit
def recfx_first_sightings(
    ids_ptr,  # int64 [n]
    positions_ptr,  # int32 [absent]
    tables_ptr,  # int32 [absent]
    buckets_ptr,  # int32 [absent]
    by_hash_ptr,  # int64 [absent], the absent ids in the order of their tables, hashes and positions
    new_buckets_ptr,  # int32 [absent], the bucket of an id that has not been there before, num_buckets for others
    num_absent,
    num_buckets,  # of all tables
    absent_per_program,
):
    """Find out which absent ids are the first of equal ones in their table."""
    begin = tl.program_id(0) * absent_per_program
    for k in range(begin, tl.minimum(begin + absent_per_program, num_absent)):
        number = tl.load(by_hash_ptr + k)
        before = tl.load(by_hash_ptr + tl.maximum(k - 1, 0))
        key = tl.load(ids_ptr + tl.load(positions_ptr + number))
        key_before = tl.load(ids_ptr + tl.load(positions_ptr + before))
        bucket = tl.load(buckets_ptr + number)
        if (k > 0) & (key == key_before) & (tl.load(tables_ptr + number) == tl.load(tables_ptr + before)):
            bucket = tl.cast(num_buckets, tl.int32)
        tl.store(new_buckets_ptr + number, bucket)


@triton.jit
def _bucket_at(k, by_bucket_ptr, new_buckets_ptr, num_absent, num_buckets):
    """The bucket of the k-th new id in the order of buckets; num_buckets after the last one."""
    bucket = tl.cast(num_buckets, tl.int32)
    if k < num_absent:
        bucket = tl.load(new_buckets_ptr + tl.load(by_bucket_ptr + k))
    return bucket


@triton.jit
def _first_of_program(begin, end, by_bucket_ptr, new_buckets_ptr, num_absent, num_buckets):
    """A program takes the buckets whose first new id is among its own: where the first of them begins."""
    k = begin
    if begin > 0:
        before = _bucket_at(begin - 1, by_bucket_ptr, new_buckets_ptr, num_absent, num_buckets)
        bucket = _bucket_at(k, by_bucket_ptr, new_buckets_ptr, num_absent, num_buckets)
        while (k < end) & (bucket == before):
            k += 1
            bucket = _bucket_at(k, by_bucket_ptr, new_buckets_ptr, num_absent, num_buckets)
    return k


@triton.jit
def _owner(row, end, row_ids_ptr, side_row):
    """The id that has the row, or another number if that is id -1; -1 if the row is free, or not before ``end``."""
    owner = tl.full((), -1, tl.int64)
    if row < end:
        owner = tl.load(row_ids_ptr + row)
        if row == side_row:
            owner = tl.full((), 0, tl.int64)
    return owner


@triton.jit
def recfx_plan_rows(
    ids_ptr,  # int64 [n]
    positions_ptr,  # int32 [absent]
    tables_ptr,  # int32 [absent]
    new_buckets_ptr,  # int32 [absent]
    by_bucket_ptr,  # int64 [absent], the absent ids in the order of new_buckets, then of their positions
    facts_ptr,  # int64 [tables, FIELDS]
    side_rows_ptr,  # int64 [tables]
    row_ids_ptr,  # int64 [rows of all tables]
    next_free_ptr,  # int64 [num_buckets], all rows of the bucket before this one are taken
    answers_ptr,  # int64 [absent], -1; of new ids the row, -row - 2 for a shared one, -1 if the bucket is full
    num_absent,
    num_buckets,
    absent_per_program,
):
    """Choose the lowest free row of its bucket for each new id. Nothing of the index changes."""
    begin = tl.program_id(0) * absent_per_program
    end = tl.minimum(begin + absent_per_program, num_absent)
    k = _first_of_program(begin, end, by_bucket_ptr, new_buckets_ptr, num_absent, num_buckets)
    next_bucket = _bucket_at(k, by_bucket_ptr, new_buckets_ptr, num_absent, num_buckets)
    while (k < end) & (next_bucket < num_buckets):
        bucket = next_bucket
        table = tl.load(tables_ptr + tl.load(by_bucket_ptr + k))
        table_facts_ptr = facts_ptr + table * FIELDS
        own_row_ids_ptr = row_ids_ptr + tl.load(table_facts_ptr + ROWS_START)
        side_row = tl.load(side_rows_ptr + table)
        in_table = bucket - tl.load(table_facts_ptr + BUCKETS_START)
        bucket_begin = _bucket_begin(in_table, table_facts_ptr)
        bucket_end = _bucket_begin(in_table + 1, table_facts_ptr)
        row = tl.load(next_free_ptr + bucket)
        while next_bucket == bucket:
            number = tl.load(by_bucket_ptr + k)
            owner = _owner(row, bucket_end, own_row_ids_ptr, side_row)
            while owner != -1:
                row += 1
                owner = _owner(row, bucket_end, own_row_ids_ptr, side_row)
            answer = row
            if row < bucket_end:
                row += 1
            else:
                answer = tl.full((), -1, tl.int64)
                if tl.load(table_facts_ptr + SHARES) == 1:
                    key = tl.load(ids_ptr + tl.load(positions_ptr + number))
                    place = mix63(key, tl.load(table_facts_ptr + MIXED_NEXT_SEED)) % (bucket_end - bucket_begin)
                    answer = -(bucket_begin + place) - 2
            tl.store(answers_ptr + number, answer)
            k += 1
            next_bucket = _bucket_at(k, by_bucket_ptr, new_buckets_ptr, num_absent, num_buckets)


@triton.jit
def recfx_take_rows(
    ids_ptr,  # int64 [n]
    positions_ptr,  # int32 [absent]
    tables_ptr,  # int32 [absent]
    new_buckets_ptr,  # int32 [absent]
    by_bucket_ptr,  # int64 [absent]
    answers_ptr,  # int64 [absent], from recfx_plan_rows
    facts_ptr,  # int64 [tables, FIELDS]
    row_ids_ptr,  # int64 [rows of all tables]
    row_states_ptr,  # int8 [rows of all tables]
    bucket_taken_ptr,  # int64 [num_buckets]
    next_free_ptr,  # int64 [num_buckets]
    states_before_ptr,  # int8 [absent], zeros; of the rows that are given to new ids
    num_absent,
    num_buckets,
    absent_per_program,
):
    """Take the rows that were chosen; programs take the buckets that they have planned."""
    begin = tl.program_id(0) * absent_per_program
    end = tl.minimum(begin + absent_per_program, num_absent)
    k = _first_of_program(begin, end, by_bucket_ptr, new_buckets_ptr, num_absent, num_buckets)
    next_bucket = _bucket_at(k, by_bucket_ptr, new_buckets_ptr, num_absent, num_buckets)
    while (k < end) & (next_bucket < num_buckets):
        bucket = next_bucket
        table_facts_ptr = facts_ptr + tl.load(tables_ptr + tl.load(by_bucket_ptr + k)) * FIELDS
        rows_start = tl.load(table_facts_ptr + ROWS_START)
        marks_new = tl.load(table_facts_ptr + MARKS_NEW)
        taken = tl.full((), 0, tl.int64)
        last = tl.full((), -1, tl.int64)
        while next_bucket == bucket:
            number = tl.load(by_bucket_ptr + k)
            row = tl.load(answers_ptr + number)
            if row >= 0:
                state = tl.load(row_states_ptr + rows_start + row)
                tl.store(states_before_ptr + number, state)
                marked = tl.where(state == 0, 3, 5)
                tl.store(row_states_ptr + rows_start + row, tl.where(marks_new == 1, marked, 1).to(tl.int8))
                tl.store(row_ids_ptr + rows_start + row, tl.load(ids_ptr + tl.load(positions_ptr + number)))
                taken += 1
                last = row
            k += 1
            next_bucket = _bucket_at(k, by_bucket_ptr, new_buckets_ptr, num_absent, num_buckets)
        if taken > 0:
            tl.store(bucket_taken_ptr + bucket, tl.load(bucket_taken_ptr + bucket) + taken)
            tl.store(next_free_ptr + bucket, last + 1)


@triton.jit
def _held(slot, slots, slots_ptr):
    """The id in a slot; -1 if it is empty, or not before ``slots``."""
    held = tl.full((), -1, tl.int64)
    if slot < slots:
        held = tl.load(slots_ptr + _element(slot))
    return held


@triton.jit
def recfx_place_ids(
    ids_ptr,  # int64 [n]
    positions_ptr,  # int32 [absent]
    new_buckets_ptr,  # int32 [absent]
    by_hash_ptr,  # int64 [absent]
    answers_ptr,  # int64 [absent]
    facts_ptr,  # int64 [tables, FIELDS]
    begins_ptr,  # int64 [tables], where the absent ids of each table begin in the order of hashes
    ends_ptr,  # int64 [tables]
    slots_ptr,  # int64, the slot groups of all tables
    side_rows_ptr,  # int64 [tables]
    rows_ptr,  # int64 [n], those of absent ids are written
    left_ptr,  # int64 [tables], the first new id that found no empty slot up to the end of its table; its end if none
    inserted_ptr,  # int64 [tables], how many ids were given a row
    shared_ptr,  # int64 [tables], how often ids share a row
    num_tables,
    num_buckets,
    again,  # 1: the ids that are left go on from the first slot of the table, in a launch after the first
):
    """Write new ids and their rows into slots, and the answers of all absent ids. One program per table."""
    for table in range(tl.program_id(0), num_tables, tl.num_programs(0)):
        table_facts_ptr = facts_ptr + table * FIELDS
        own_slots_ptr = slots_ptr + tl.load(table_facts_ptr + SLOTS_START)
        slots = tl.load(table_facts_ptr + SLOTS)
        end = tl.load(ends_ptr + table)
        left = end
        slot = tl.full((), 0, tl.int64)  # the first that this launch has not read
        answer = tl.full((), -1, tl.int64)
        inserted = tl.full((), 0, tl.int64)
        shared = tl.full((), 0, tl.int64)
        for k in range(tl.load(begins_ptr + table), end):
            number = tl.load(by_hash_ptr + k)
            position = tl.load(positions_ptr + number)
            key = tl.load(ids_ptr + position)
            if tl.load(new_buckets_ptr + number) < num_buckets:
                answer = tl.load(answers_ptr + number)
                if answer >= 0:
                    inserted += 1
                    if key == -1:
                        tl.store(side_rows_ptr + table, answer)
                    else:
                        if again == 0:
                            slot = tl.maximum(slot, _home_slot(key, slots, table_facts_ptr))
                        held = _held(slot, slots, own_slots_ptr)
                        while held != -1:
                            slot += 1
                            held = _held(slot, slots, own_slots_ptr)
                        if slot < slots:
                            tl.store(own_slots_ptr + _element(slot), key)
                            tl.store(own_slots_ptr + _element(slot) + 4, answer)
                            slot += 1
                        else:
                            left = tl.minimum(left, k)
            row = answer
            if answer < -1:
                row = -answer - 2
                shared += 1
            tl.store(rows_ptr + position, row)
        tl.store(left_ptr + table, left)
        tl.store(inserted_ptr + table, inserted)
        tl.store(shared_ptr + table, shared)
