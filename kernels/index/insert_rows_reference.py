"""``insert_rows`` one id after the other, in Python: what the kernels have to do, on any device."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from recfx.kernels.index.device_indexes import DeviceIndexes, InsertFacts
from recfx.kernels.index.index_buffers import NEVER_USED, NEW, RENEWED, SHARED_ANSWERS, TAKEN
from recfx.kernels.index.insert_rows import InsertedRows
from recfx.kernels.index.mix64 import mix64_integer
from recfx.kernels.index.slot_groups import SLOTS

_INT63, _UINT64 = 2**63 - 1, 2**64 - 1


@dataclass
class _Plan:
    """What a batch does to one table."""

    rows: list[int] = field(default_factory=list)  # of its ids
    given: dict[int, int] = field(default_factory=dict)  # new ids, and the rows that they get
    shared: int = 0
    full_bucket: int = -1


def insert_rows_reference(ids: Tensor, table_ends: Tensor, indexes: DeviceIndexes) -> InsertedRows:
    """``insert_rows``: decides everything first, and changes everything then."""
    begins = [0, *table_ends.tolist()]
    pieces = [ids[begin:end].tolist() for begin, end in pairwise(begins)]
    plans = [_plan(piece, table, indexes) for table, piece in enumerate(pieces)]
    report = ids.new_tensor([[len(plan.given), plan.full_bucket] for plan in plans]).view(-1, 2)
    if any(plan.full_bucket >= 0 for plan in plans):
        nothing = ids.new_empty(0)
        return InsertedRows(torch.full_like(ids, -1), nothing, nothing.to(torch.uint8), report)
    states: list[int] = []
    for table, plan in enumerate(plans):
        states += _apply(plan, table, indexes)
    rows = ids.new_tensor([row for plan in plans for row in plan.rows])
    new_rows = ids.new_tensor([row for plan in plans for row in plan.given.values()])
    return InsertedRows(rows, new_rows, torch.tensor(states, dtype=torch.uint8, device=ids.device), report)


def _facts(table: int, indexes: DeviceIndexes) -> InsertFacts:
    return InsertFacts(*indexes.facts[table].tolist())


def _slots(table: int, indexes: DeviceIndexes) -> tuple[Tensor, Tensor]:
    """Views of a table's slots: the ids, and the rows."""
    facts = _facts(table, indexes)
    first = facts.slots_start // (2 * SLOTS)
    groups = indexes.slot_groups[first : first + facts.slots // SLOTS]
    return groups[:, :SLOTS], groups[:, SLOTS:]


def _bucket_of(id_: int, facts: InsertFacts) -> int:
    return (mix64_integer(id_ ^ facts.mixed_seed) & _INT63) % facts.buckets


def _rows_of(bucket: int, facts: InsertFacts) -> range:
    index_rows = facts.rows - facts.dense_rows
    return range(*(facts.dense_rows + each * index_rows // facts.buckets for each in (bucket, bucket + 1)))


def _plan(ids: list[int], table: int, indexes: DeviceIndexes) -> _Plan:
    facts, plan = _facts(table, indexes), _Plan()
    if facts.slots == 0:
        plan.rows = ids
        return plan
    slot_ids, slot_rows = _slots(table, indexes)
    held: dict[int, int] = dict(zip(slot_ids.flatten().tolist(), slot_rows.flatten().tolist(), strict=True))
    held[-1] = int(indexes.side_rows[table])  # the slots of id -1 are empty
    row_ids = indexes.row_ids[facts.rows_start : facts.rows_start + facts.rows].tolist()
    taken = {row for row, id_ in enumerate(row_ids) if id_ != -1} | {held[-1]}
    sharing: dict[int, int] = {}
    for id_ in ids:
        row = id_ if 0 <= id_ < facts.dense_rows else plan.given.get(id_, held.get(id_, -1))
        if row == -1 and id_ not in sharing:
            bucket = _bucket_of(id_, facts)
            rows = _rows_of(bucket, facts)
            row = next((row for row in rows if row not in taken), -1)
            if row >= 0:
                plan.given[id_] = row
                taken.add(row)
            elif facts.shares:
                sharing[id_] = rows[(mix64_integer(id_ ^ facts.mixed_next_seed) & _INT63) % len(rows)]
            else:
                plan.full_bucket = bucket
                return plan
        plan.shared += id_ in sharing
        plan.rows.append(sharing.get(id_, row))
    return plan


def _apply(plan: _Plan, table: int, indexes: DeviceIndexes) -> list[int]:
    """Returns the states of the new rows before."""
    facts, states = _facts(table, indexes), []
    if facts.slots == 0:
        return []
    for id_, row in plan.given.items():
        where, bucket = facts.rows_start + row, facts.buckets_start + _bucket_of(id_, facts)
        states.append(int(indexes.row_states[where]))
        marked = NEW if states[-1] == NEVER_USED else RENEWED
        indexes.row_states[where] = marked if facts.marks_new else TAKEN
        indexes.row_ids[where] = id_
        indexes.bucket_taken[bucket] += 1
        indexes.next_free[bucket] = row + 1
    if -1 in plan.given:
        indexes.side_rows[table] = plan.given[-1]
    _place(plan.given, table, indexes)
    counted = torch.tensor([1, len(plan.rows), len(plan.given), 0, plan.shared])  # in the order of COUNTERS
    indexes.counts[table, : SHARED_ANSWERS + 1] += counted.to(indexes.counts.device)
    return states


def _place(given: dict[int, int], table: int, indexes: DeviceIndexes) -> None:
    """Write ids into slots in the order of their hashes; those that find none up to the last begin at the first."""
    facts, (slot_ids, slot_rows) = _facts(table, indexes), _slots(table, indexes)
    groups = slot_ids.shape[0]
    held = slot_ids.flatten().tolist()

    def hash_of(id_: int) -> int:
        k = (id_ ^ facts.hash_xor) & _UINT64
        k = ((k ^ (k >> 33)) * 0xFF51AFD7ED558CCD) & _UINT64
        return ((k ^ (k >> 33)) * facts.hash_factor) & _UINT64

    def empty_from(slot: int) -> int | None:
        return next((each for each in range(slot, len(held)) if held[each] == -1), None)

    def put(id_: int, slot: int) -> None:
        held[slot] = slot_ids[slot // SLOTS, slot % SLOTS] = id_
        slot_rows[slot // SLOTS, slot % SLOTS] = given[id_]

    left = []
    for id_ in sorted(given.keys() - {-1}, key=hash_of):
        slot = empty_from(((hash_of(id_) >> 32) * groups >> 32) * SLOTS)
        if slot is None:
            left.append(id_)
        else:
            put(id_, slot)
    for id_ in left:
        slot = empty_from(0)
        assert slot is not None  # there are more slots than rows
        put(id_, slot)
