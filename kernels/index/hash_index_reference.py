"""The operators of ``hash_index.py`` in ATen and Python: their definition, and what runs if nothing can be compiled.

They take flat lists of buffers and policies, as the C++ operators do, and may only be called from one thread at a time.
``find`` is pure ATen. The operators that change an index are written to be read: they first decide everything and then
change everything, so that a full table changes nothing. They change copies of the buffers, which a single operator then
copies back, so that an exception in the middle (Ctrl-C, say) leaves all tables as they were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recfx.kernels.build import library
from recfx.kernels.index.buckets import bucket_of, home_rows, shared_rows
from recfx.kernels.index.free_rows import update_free_rows
from recfx.kernels.index.index_buffers import (
    BATCH_BITS,
    BATCHES,
    EVICTED,
    FREED,
    MOST_SIGHTINGS,
    NEVER_USED,
    NEW,
    NEW_ID_BITS,
    RENEWED,
    TAKEN,
    IndexBuffers,
    IndexPolicy,
    grouped,
    is_taken,
    is_uninitialized,
)
from recfx.kernels.index.mix64 import mix64
from recfx.kernels.index.slot_groups import erase_from_groups, find_in_groups, insert_into_groups


@library.reference("find")
def find(
    ids: Tensor,
    slot_groups: Tensor,
    side_row: Tensor,
    dense_rows: int,
    lock: Tensor | None = None,
    dense_begin: int = 0,
) -> Tensor:
    """``find`` in ATen. Scriptable."""
    is_dense = (ids >= dense_begin) & (ids < dense_begin + dense_rows)
    return torch.where(is_dense, ids - dense_begin, find_in_groups(ids, slot_groups, side_row))


@library.reference("find_tables")
def find_tables(
    ids: Tensor,
    begins: list[int],
    ends: list[int],
    slot_groups: list[Tensor],
    side_rows: list[Tensor],
    locks: list[Tensor],
    dense_rows: list[int],
    dense_begins: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """``find_tables`` in ATen. Scriptable."""
    rows = ids.clone()
    absent = torch.zeros(len(begins), dtype=torch.int64)
    for table in range(len(begins)):
        begin, end = begins[table], ends[table]
        first = 0 if dense_begins is None else dense_begins[table]
        rows[begin:end] = find(ids[begin:end], slot_groups[table], side_rows[table], dense_rows[table], None, first)
        absent[table] = (rows[begin:end] < 0).sum()
    return rows, absent


@dataclass
class _Candidate:
    place: int
    sightings: int


@dataclass
class _NewId:
    """An id of the batch that has no row."""

    id: int
    bucket: int
    sightings: int = 0  # in this batch
    before: _Candidate | None = None
    answer: int = -1
    row: int = -1  # of its own

    @property
    def total(self) -> int:
        return self.sightings + (0 if self.before is None else self.before.sightings)


@dataclass
class _Plan:
    """What a batch will do to one table."""

    rows: Tensor
    found: Tensor
    new_ids: list[_NewId]
    evicted: dict[int, int] = field(default_factory=dict)  # row -> id that loses it
    full_bucket: int = -1
    shared_answers: int = 0
    unseen_answers: int = 0

    @property
    def inserted(self) -> list[_NewId]:
        return [new for new in self.new_ids if new.row >= 0]


@library.reference("find_or_insert")
def find_or_insert(
    ids: Tensor,
    begins: list[int],
    ends: list[int],
    all_buffers: list[Tensor],
    all_policies: list[int],
    oldest_in_flight: list[int],
    rows_in_flight: list[Tensor] | None = None,
    oldest_listed: list[int] | None = None,
) -> tuple[Tensor, ...]:
    """``find_or_insert``."""
    rest = all_buffers, all_policies, oldest_in_flight, rows_in_flight
    expired = _expire(ids, *rest)
    return *_insert(ids, begins, ends, *rest), expired


def _expire(
    ids: Tensor,
    all_buffers: list[Tensor],
    all_policies: list[int],
    oldest_in_flight: list[int],
    rows_in_flight: list[Tensor] | None,
) -> Tensor:
    """Take their rows from the ids that have not been seen for too long; returns these ids."""
    buffers, policies = grouped(IndexBuffers, all_buffers), grouped(IndexPolicy, all_policies)
    if not any(policy.ttl_batches for policy in policies):
        return ids.new_empty(0)
    listed = rows_in_flight or [ids.new_empty(0)] * len(buffers)
    changed, expired = _copies(buffers), []
    for index, policy, oldest, kept in zip(changed, policies, oldest_in_flight, listed, strict=True):
        batches = int(index.counts[BATCHES])
        for bucket in policy.own_buckets if policy.ttl_batches else ():
            rows = list(_victims(bucket, index, policy, kept, min(oldest, batches + 1)))
            rows = [row for row in rows if index.row_scores[row] <= batches - policy.ttl_batches]
            gone = index.row_ids[ids.new_tensor(rows)]
            _remove(gone, index, policy)
            index.counts[EVICTED] += gone.numel()
            expired.append(gone)
    _copy_back(changed, buffers)
    return torch.cat([ids.new_empty(0), *expired])


def _insert(
    ids: Tensor,
    begins: list[int],
    ends: list[int],
    all_buffers: list[Tensor],
    all_policies: list[int],
    oldest_in_flight: list[int],
    rows_in_flight: list[Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    buffers, policies = grouped(IndexBuffers, all_buffers), grouped(IndexPolicy, all_policies)
    listed = rows_in_flight or [ids.new_empty(0)] * len(buffers)
    pieces = [ids[begin:end] for begin, end in zip(begins, ends, strict=True)]
    plans = list(map(_plan, pieces, buffers, policies, oldest_in_flight, listed))
    report = ids.new_tensor([[len(plan.inserted), plan.full_bucket] for plan in plans]).view(-1, 2)
    rows = ids.clone()
    if any(plan.full_bucket >= 0 for plan in plans):
        nothing = ids.new_empty(0)
        return rows.fill_(-1), nothing, nothing.to(torch.uint8), nothing.clone(), report
    new_rows, states_before, ids_before = [], [], []
    changed = _copies(buffers)
    for begin, end, plan, index, policy in zip(begins, ends, plans, changed, policies, strict=True):
        for new in plan.inserted:
            new_rows.append(new.row)
            states_before.append(TAKEN if new.row in plan.evicted else int(index.row_state[new.row]))
            ids_before.append(plan.evicted.get(new.row, -1))
        _apply(plan, index, policy)
        rows[begin:end] = plan.rows
    states = torch.tensor(states_before, dtype=torch.uint8)
    inserted = (rows, ids.new_tensor(new_rows), states, ids.new_tensor(ids_before), report)
    _copy_back(changed, buffers)
    return inserted


def _copies(buffers: list[IndexBuffers]) -> list[IndexBuffers]:
    return [IndexBuffers(*map(torch.clone, index)) for index in buffers]


def _copy_back(changed: list[IndexBuffers], buffers: list[IndexBuffers]) -> None:
    """Copy everything back in one operator, which nothing can interrupt."""
    torch._foreach_copy_(_without_lock(buffers), _without_lock(changed))


def _without_lock(buffers: list[IndexBuffers]) -> list[Tensor]:
    return [tensor for index in buffers for name, tensor in index._asdict().items() if name != "lock"]


@library.reference("any_nonzero")
def any_nonzero(cells: list[Tensor]) -> Tensor:
    """``any_nonzero``."""
    return torch.cat(cells).any()


@library.reference("mark_initialized")
def mark_initialized(
    all_buffers: list[Tensor], policies: list[int], rows: Tensor, begins: list[int], ends: list[int]
) -> None:
    """``mark_initialized``."""
    buffers = grouped(IndexBuffers, all_buffers)
    changed = _copies(buffers)
    for index, begin, end in zip(changed, begins, ends, strict=True):
        mine = rows[begin:end]
        mine = mine[is_uninitialized(index.row_state[mine])]
        index.row_state[mine] = TAKEN
        index.uninitialized.sub_(mine.numel())
    _copy_back(changed, buffers)


def _plan(
    ids: Tensor, index: IndexBuffers, policy: IndexPolicy, oldest_in_flight: int, rows_in_flight: Tensor
) -> _Plan:
    rows = find(ids, index.slot_groups, index.side_row, policy.own_dense_rows, None, policy.row_begin)
    _refuse_foreign(ids[rows < 0], policy)
    candidates = _candidates(index, policy)
    by_id: dict[int, _NewId] = {}
    missing = torch.nonzero(rows < 0).squeeze(1)
    missing_ids = ids[missing].tolist()
    buckets = bucket_of(ids[missing], policy.buckets, policy.seed).tolist()
    for id_, bucket in zip(missing_ids, buckets, strict=True):
        by_id.setdefault(id_, _NewId(id_, bucket, before=candidates.get(id_))).sightings += 1
    plan = _Plan(rows, rows[rows >= policy.own_dense_rows], list(by_id.values()))
    free: dict[int, Iterator[int]] = {}
    victims: dict[int, Iterator[int]] = {}
    in_flight = min(oldest_in_flight, int(index.counts[BATCHES]) + 1)
    for new in plan.new_ids:
        if new.total < policy.admit_after:
            new.answer = -_shared_row(new.id, policy) - 2 if policy.unseen else -1
            plan.unseen_answers += new.sightings
            continue
        if new.bucket not in free:
            free[new.bucket] = _free_rows(new.bucket, index, policy)
        new.row = next(free[new.bucket], -1)
        if new.row < 0 and policy.evicts:
            if new.bucket not in victims:
                kept = torch.cat([plan.found, rows_in_flight])
                victims[new.bucket] = _victims(new.bucket, index, policy, kept, in_flight)
            new.row = next(victims[new.bucket], -1)
            if new.row >= 0:
                plan.evicted[new.row] = int(index.row_ids[new.row])
        new.answer = new.row
        if new.row < 0 and policy.on_full == 1:
            new.answer = _shared_row(new.id, policy)
            plan.shared_answers += new.sightings
        elif new.row < 0:
            plan.full_bucket = new.bucket
            return plan
    rows[missing] = ids.new_tensor([by_id[id_].answer for id_ in missing_ids])
    return plan


def _candidates(index: IndexBuffers, policy: IndexPolicy) -> dict[int, _Candidate]:
    if not policy.admits:
        return {}
    places = torch.nonzero(index.candidate_counts).squeeze(1)
    ids, sightings = index.candidate_ids[places].tolist(), index.candidate_counts[places].tolist()
    return dict(zip(ids, map(_Candidate, places.tolist(), sightings), strict=True))


def _refuse_foreign(absent: Tensor, policy: IndexPolicy) -> None:
    home = home_rows(absent, policy.rows, policy.dense_rows, policy.buckets, policy.seed)
    foreign = absent[(home < policy.row_begin) | (home >= policy.row_end)]
    if foreign.numel() > 0:
        raise RuntimeError(
            f"recfx: find_or_insert: id {int(foreign[0])} belongs to another slice of the table than rows "
            f"{policy.row_begin} to {policy.row_end}"
        )


def _shared_row(id_: int, policy: IndexPolicy) -> int:
    row = shared_rows(torch.tensor([id_]), policy.rows, policy.dense_rows, policy.signed_buckets, policy.seed)
    return int(row) - policy.row_begin


def _rows_of(bucket: int, policy: IndexPolicy) -> slice:
    rows = policy.rows_of(bucket)
    return slice(rows.start, rows.stop)


def _free_rows(bucket: int, index: IndexBuffers, policy: IndexPolicy) -> Iterator[int]:
    here = _rows_of(bucket, policy)
    here = slice(here.start, here.stop - (policy.unseen == 2))
    return iter((here.start + torch.nonzero(~is_taken(index.row_state[here])).squeeze(1)).tolist())


def _victims(bucket: int, index: IndexBuffers, policy: IndexPolicy, kept: Tensor, in_flight: int) -> Iterator[int]:
    """The rows of the bucket that may be evicted, in the order in which they are evicted."""
    here, is_lfu = _rows_of(bucket, policy), policy.evict == 1
    last_batch = index.row_scores[here] & (2**BATCH_BITS - 1) if is_lfu else index.row_scores[here]
    may_go = is_taken(index.row_state[here]) & (last_batch < in_flight)
    rows = here.start + torch.nonzero(may_go).squeeze(1)
    rows = rows[~torch.isin(rows, kept)]
    scores = index.row_scores[rows] >> BATCH_BITS if is_lfu else index.row_scores[rows]
    order = sorted(zip(scores.tolist(), mix64(index.row_ids[rows]).tolist(), rows.tolist(), strict=True))
    return (row for _, _, row in order)


def _apply(plan: _Plan, index: IndexBuffers, policy: IndexPolicy) -> None:
    batch = int(index.counts[BATCHES]) + 1
    for id_ in plan.evicted.values():
        erase_from_groups(id_, index.slot_groups, index.side_row)
    inserted = plan.inserted
    ids = index.row_ids.new_tensor([new.id for new in inserted])
    rows = index.row_ids.new_tensor([new.row for new in inserted])
    insert_into_groups(ids, rows, index.slot_groups, index.side_row)
    index.row_ids[rows] = ids
    before = index.row_state[rows]
    marked = torch.where(before == NEVER_USED, NEW, RENEWED).to(torch.uint8)
    index.row_state[rows] = marked if policy.mark_new else torch.full_like(marked, TAKEN)
    index.uninitialized.add_(rows.numel() * policy.mark_new - is_uninitialized(before).sum())
    update_free_rows(index.free_rows, index.row_state, rows, policy.own_dense_rows)
    for new in inserted:
        index.bucket_taken[new.bucket - policy.own_buckets.start] += new.row not in plan.evicted
    index.victim_heads.fill_(-1)  # the C++ operators start their searches again
    index.oldest_heads.fill_(-1)
    if policy.evicts:
        _touch(plan, index, policy, batch)
    if policy.admits:
        _update_candidates(plan, index, policy, batch)
    counted = 1, plan.rows.numel(), len(inserted), len(plan.evicted), plan.shared_answers, plan.unseen_answers
    index.counts.add_(index.counts.new_tensor(counted))  # in the order of COUNTERS


def _touch(plan: _Plan, index: IndexBuffers, policy: IndexPolicy, batch: int) -> None:
    rows, times = torch.unique(plan.found, return_counts=True)
    new_rows = rows.new_tensor([new.row for new in plan.inserted])
    if policy.evict == 0:
        index.row_scores[rows] = batch
        index.row_scores[new_rows] = batch
        return
    totals = rows.new_tensor([new.total for new in plan.inserted])
    sightings = (index.row_scores[rows] >> BATCH_BITS) + times
    index.row_scores[rows] = (sightings.clamp(max=MOST_SIGHTINGS) << BATCH_BITS) + batch
    index.row_scores[new_rows] = (totals.clamp(max=MOST_SIGHTINGS) << BATCH_BITS) + batch


def _update_candidates(plan: _Plan, index: IndexBuffers, policy: IndexPolicy, batch: int) -> None:
    for new in plan.new_ids:
        if new.before is not None and new.row >= 0:
            _free_place(new.before.place, index, policy)
        elif new.before is not None:
            index.candidate_counts[new.before.place] = min(new.total, policy.admit_after)
    numbers: Counter[int] = Counter()  # new candidates per bucket so far
    for new in plan.new_ids:
        if new.before is not None or new.row >= 0:
            continue
        bucket = _rows_of(new.bucket, policy)
        counts = index.candidate_counts[bucket]
        if bool((counts > 0).all()):
            _free_place(bucket.start + int(index.candidate_order[bucket].argmin()), index, policy)
        place = bucket.start + int((counts == 0).to(torch.uint8).argmax())
        order = (batch << NEW_ID_BITS) + numbers[new.bucket]
        numbers[new.bucket] += 1
        _write_place(place, index, policy, new.id, min(new.sightings, policy.admit_after), order)
        id_, row = index.row_ids.new_tensor([[new.id], [place]])
        insert_into_groups(id_, row, index.candidate_slot_groups, index.candidate_side_row)


def _free_place(place: int, index: IndexBuffers, policy: IndexPolicy) -> None:
    erase_from_groups(int(index.candidate_ids[place]), index.candidate_slot_groups, index.candidate_side_row)
    _write_place(place, index, policy, -1, 0, 0)


def _write_place(place: int, index: IndexBuffers, policy: IndexPolicy, id_: int, sightings: int, order: int) -> None:
    index.candidate_ids[place] = id_
    index.candidate_counts[place] = sightings
    index.candidate_order[place] = order
    in_use = (index.candidate_counts > 0).to(torch.uint8)
    changed = index.row_ids.new_tensor([place])
    update_free_rows(index.free_places, in_use, changed, policy.own_dense_rows)


@library.reference("add_counts")
def add_counts(counts: list[Tensor], amounts: list[int]) -> None:
    """``add_counts``."""
    for of_table, amount in zip(counts, torch.tensor(amounts).view(len(counts), -1), strict=True):
        of_table[: len(amount)] += amount


@library.reference("erase")
def erase(ids: Tensor, tensors: list[Tensor], numbers: list[int]) -> Tensor:
    """``erase``, one id at a time."""
    buffers, policy = IndexBuffers(*tensors), IndexPolicy(*numbers)
    (index,) = changed = _copies([buffers])
    candidates = _candidates(index, policy)
    for id_ in ids.tolist():
        if id_ in candidates:
            _free_place(candidates.pop(id_).place, index, policy)
    answer = _remove(ids, index, policy)
    _copy_back(changed, [buffers])
    return answer


def _remove(ids: Tensor, index: IndexBuffers, policy: IndexPolicy) -> Tensor:
    """Free the rows of these ids; returns them, -1 for an id that has none."""
    rows = [
        -1 if 0 <= id_ < policy.dense_rows else erase_from_groups(id_, index.slot_groups, index.side_row)
        for id_ in ids.tolist()
    ]
    answer = ids.new_tensor(rows)
    freed = answer[answer >= 0]
    index.row_ids[freed] = -1
    index.uninitialized.sub_(is_uninitialized(index.row_state[freed]).sum())
    index.row_state[freed] = FREED
    if policy.evicts:
        index.row_scores[freed] = 0
    update_free_rows(index.free_rows, index.row_state, freed, policy.own_dense_rows)
    own = bucket_of(ids[answer >= 0], policy.buckets, policy.seed) - policy.own_buckets.start
    index.bucket_taken.sub_(torch.bincount(own, minlength=len(policy.own_buckets)))
    return answer
