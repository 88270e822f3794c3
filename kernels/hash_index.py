"""Operators of the hash index: which row of a table belongs to which raw 64-bit id.

Each function calls the C++ operator of its name (``torch.ops.recfx.*``, ``csrc/hash_index.cpp``) and, where the library
is not available, the reference of the same contract below. Everything is on the CPU. What an index is made of is
said at ``IndexBuffers``.

Ids ``0 <= id < dense_rows`` are their own row and are in no index. Every other id belongs to one bucket,
``mixed_modulo(id, buckets, seed)``, and takes the lowest free row of it. Bucket ``b`` owns the rows from
``bucket_begin(b)`` to ``bucket_begin(b + 1)``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import library
from .free_rows import update_free_rows
from .mix64 import mix64, mixed_modulo
from .slot_table import erase_from_slots, find_in_slots, insert_into_slots

# What rebuild() finds wrong with a row; the same numbers stand in csrc/hash_index.cpp.
NO_PROBLEM, UNKNOWN_STATE, DENSE_ROW, DENSE_ID, WRONG_BUCKET, DUPLICATE_ID = range(6)


class IndexBuffers(NamedTuple):
    """The tensors of one index, all contiguous and on the CPU. The operators change them in place."""

    slots: Tensor  # int64 [slots, 2]: id to row, see slot_table.py
    side_row: Tensor  # int64 [1]: the row of id -1, which slots cannot hold; -1: none
    row_ids: Tensor  # int64 [rows]: the id that has the row, -1 where it is free
    row_state: Tensor  # uint8 [rows]: 0 free, 1 taken
    free_rows: Tensor  # int64 [words]: the free rows, see free_rows.py
    bucket_taken: Tensor  # int64 [buckets]: taken rows in each bucket


def bucket_begin(bucket: int, rows: int, dense_rows: int, buckets: int) -> int:
    """First row of a bucket; for ``bucket == buckets`` the end of the last one."""
    return dense_rows + bucket * (rows - dense_rows) // buckets


def bucket_begins(bucket: Tensor, rows: int, dense_rows: int, buckets: int) -> Tensor:
    """``bucket_begin`` of a tensor of buckets. Scriptable."""
    return dense_rows + torch.div(bucket * (rows - dense_rows), buckets, rounding_mode="floor")


def bucket_of(ids: Tensor, buckets: int, seed: int) -> Tensor:
    """The bucket of each id, int64 ``[n]``. Scriptable. Means nothing for ids below ``dense_rows``."""
    return mixed_modulo(ids, buckets, seed)


def shared_rows(ids: Tensor, rows: int, dense_rows: int, buckets: int, seed: int) -> Tensor:
    """The row of its bucket that an id without a row of its own shares, by hash (the hashing trick). Scriptable."""
    bucket = bucket_of(ids, buckets, seed)
    begin = bucket_begins(bucket, rows, dense_rows, buckets)
    end = bucket_begins(bucket + 1, rows, dense_rows, buckets)
    return begin + torch.remainder(mix64(ids, seed + 1) & 0x7FFFFFFFFFFFFFFF, end - begin)


def find(ids: Tensor, slots: Tensor, side_row: Tensor, dense_rows: int) -> Tensor:
    """The row of each id, -1 where it has none. Reads only, on all threads.

    Args:
        ids: int64 ``[n]``.
        slots, side_row: see ``IndexBuffers``.
        dense_rows: ids ``0 <= id < dense_rows`` are their own row.

    Returns:
        int64 ``[n]``.
    """
    if library.load():
        return torch.ops.recfx.find(ids, slots, side_row, dense_rows)
    return find_reference(ids, slots, side_row, dense_rows)


def find_reference(ids: Tensor, slots: Tensor, side_row: Tensor, dense_rows: int) -> Tensor:
    """``find`` in ATen. Scriptable."""
    is_dense = (ids >= 0) & (ids < dense_rows)
    return torch.where(is_dense, ids, find_in_slots(ids, slots, side_row))


def find_tables(
    ids: Tensor,
    begins: list[int],
    ends: list[int],
    slots: list[Tensor],
    side_rows: list[Tensor],
    dense_rows: list[int],
) -> tuple[Tensor, Tensor]:
    """``find`` for several tables at once, each on its own stretch of ``ids``.

    Args:
        ids: int64 ``[n]``.
        begins, ends: where the ids of each table begin and end; ids outside every stretch come back as they are.
        slots, side_rows, dense_rows: of each table, as for ``find``.

    Returns:
        rows: int64 ``[n]``, -1 where a table does not hold the id.
        absent: int64 ``[tables]``, how many of those each table has.
    """
    if library.load():
        return torch.ops.recfx.find_tables(ids, begins, ends, slots, side_rows, dense_rows)
    return find_tables_reference(ids, begins, ends, slots, side_rows, dense_rows)


def find_tables_reference(
    ids: Tensor,
    begins: list[int],
    ends: list[int],
    slots: list[Tensor],
    side_rows: list[Tensor],
    dense_rows: list[int],
) -> tuple[Tensor, Tensor]:
    """``find_tables`` in ATen. Scriptable."""
    rows = ids.clone()
    absent = torch.zeros(len(begins), dtype=torch.int64)
    for table in range(len(begins)):
        begin, end = begins[table], ends[table]
        rows[begin:end] = find_reference(ids[begin:end], slots[table], side_rows[table], dense_rows[table])
        absent[table] = (rows[begin:end] < 0).sum()
    return rows, absent


def find_or_insert(
    ids: Tensor,
    buffers: IndexBuffers,
    dense_rows: int,
    seed: int,
    share: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The row of each id; ids without one get one, in order of first appearance, the lowest free row of their bucket.

    Where the bucket is full: with ``share`` the id is answered with a row of its bucket, by its hash, and not inserted;
    without, the index is left as it was and ``status`` names the bucket. The result does not depend on the number of
    threads. The cost is linear in ids, and nothing as large as the table is allocated (the reference does read the
    state of whole buckets).

    Returns:
        rows: int64 ``[n]``; -1 throughout if a bucket is full and ``share`` is off.
        new_rows: int64, the rows just taken, in the order in which they were taken.
        status: int64 ``[2]``: the first bucket found full, else (or with ``share``) -1; answers shared.
    """
    if library.load():
        return torch.ops.recfx.find_or_insert(ids, *buffers, dense_rows, seed, share)
    return find_or_insert_reference(ids, buffers, dense_rows, seed, share)


def find_or_insert_reference(
    ids: Tensor,
    buffers: IndexBuffers,
    dense_rows: int,
    seed: int,
    share: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``find_or_insert`` in ATen."""
    slots, side_row, row_ids, row_state, free_rows, bucket_taken = buffers
    rows, buckets = row_ids.numel(), bucket_taken.numel()
    answer = find_reference(ids, slots, side_row, dense_rows)
    missing = torch.nonzero(answer < 0).squeeze(1)
    candidates, candidate_of_missing = _in_order_of_appearance(ids[missing])
    candidate_bucket = bucket_of(candidates, buckets, seed)

    candidate_row = torch.full_like(candidates, -1)
    for bucket in torch.unique(candidate_bucket).tolist():
        begin, end = (bucket_begin(b, rows, dense_rows, buckets) for b in (bucket, bucket + 1))
        waiting = torch.nonzero(candidate_bucket == bucket).squeeze(1)
        free = begin + torch.nonzero(row_state[begin:end] == 0).squeeze(1)
        served = min(waiting.numel(), free.numel())
        candidate_row[waiting[:served]] = free[:served]

    without = torch.nonzero(candidate_row < 0).squeeze(1)
    if without.numel() > 0 and not share:
        full_bucket = int(candidate_bucket[without[0]])
        return torch.full_like(ids, -1), ids.new_empty(0), ids.new_tensor([full_bucket, 0])

    inserted = candidate_row >= 0
    new_ids, new_rows = candidates[inserted], candidate_row[inserted]
    insert_into_slots(new_ids, new_rows, slots, side_row)
    row_ids[new_rows] = new_ids
    row_state[new_rows] = 1
    update_free_rows(free_rows, row_state, new_rows, dense_rows)
    bucket_taken += torch.bincount(candidate_bucket[inserted], minlength=buckets)

    candidate_row[without] = shared_rows(candidates[without], rows, dense_rows, buckets, seed)
    answer[missing] = candidate_row[candidate_of_missing]
    answers_shared = int((~inserted)[candidate_of_missing].sum())
    return answer, new_rows, ids.new_tensor([-1, answers_shared])


def _in_order_of_appearance(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids in the order in which each appears first, and for every id its place among them."""
    distinct, inverse = torch.unique(ids, return_inverse=True)
    position = torch.arange(ids.numel(), device=ids.device)
    first = torch.full_like(distinct, ids.numel()).scatter_reduce_(0, inverse, position, "amin")
    order = torch.argsort(first)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel(), device=ids.device)
    return distinct[order], place[inverse]


def erase(ids: Tensor, buffers: IndexBuffers, dense_rows: int, seed: int) -> Tensor:
    """Take the rows of these ids back; ids without one, and ids below ``dense_rows``, are left alone.

    Returns:
        int64 ``[n]``: the row that each id had, -1 where it had none (or appeared before in ``ids``).
    """
    if library.load():
        return torch.ops.recfx.erase(ids, *buffers, dense_rows, seed)
    return erase_reference(ids, buffers, dense_rows, seed)


def erase_reference(ids: Tensor, buffers: IndexBuffers, dense_rows: int, seed: int) -> Tensor:
    """``erase`` in ATen and Python, one id after the other."""
    slots, side_row, row_ids, row_state, free_rows, bucket_taken = buffers
    rows = [-1 if 0 <= id_ < dense_rows else erase_from_slots(id_, slots, side_row) for id_ in ids.tolist()]
    answer = ids.new_tensor(rows)
    freed = answer[answer >= 0]
    row_ids[freed] = -1
    row_state[freed] = 0
    update_free_rows(free_rows, row_state, freed, dense_rows)
    buckets = bucket_taken.numel()
    bucket_taken -= torch.bincount(bucket_of(ids[answer >= 0], buckets, seed), minlength=buckets)
    return answer


def rebuild(buffers: IndexBuffers, dense_rows: int, seed: int) -> Tensor:
    """Check ``row_ids`` and ``row_state`` and fill the other four buffers from them.

    Returns:
        int64 ``[2]``: what is wrong (``NO_PROBLEM``, ``UNKNOWN_STATE``, ...) and the lowest row with something wrong,
        -1 if there is none. If something is wrong the other four buffers hold garbage.
    """
    if library.load():
        return torch.ops.recfx.rebuild(*buffers, dense_rows, seed)
    return rebuild_reference(buffers, dense_rows, seed)


def rebuild_reference(buffers: IndexBuffers, dense_rows: int, seed: int) -> Tensor:
    """``rebuild`` in ATen."""
    slots, side_row, row_ids, row_state, free_rows, bucket_taken = buffers
    rows, buckets = row_ids.numel(), bucket_taken.numel()
    slots.fill_(-1)
    side_row.fill_(-1)
    taken = torch.nonzero(row_state).squeeze(1)
    ids = row_ids[taken]
    bucket = bucket_of(ids, buckets, seed)
    begin = bucket_begins(bucket, rows, dense_rows, buckets)
    end = bucket_begins(bucket + 1, rows, dense_rows, buckets)
    _, place = _in_order_of_appearance(ids)
    # Most important last: a row with several problems is reported with the one that csrc/hash_index.cpp meets first.
    problem = torch.full_like(taken, NO_PROBLEM)
    problem[_appeared_before(place)] = DUPLICATE_ID
    problem[(taken < begin) | (taken >= end)] = WRONG_BUCKET
    problem[(ids >= 0) & (ids < dense_rows)] = DENSE_ID
    problem[taken < dense_rows] = DENSE_ROW
    problem[row_state[taken] != 1] = UNKNOWN_STATE
    bad = torch.nonzero(problem).squeeze(1)
    if bad.numel() > 0:
        return torch.stack([problem[bad[0]], taken[bad[0]]])
    insert_into_slots(ids, taken, slots, side_row)
    free_rows.zero_()
    update_free_rows(free_rows, row_state, torch.arange(0, rows, 64, device=row_ids.device), dense_rows)
    bucket_taken.copy_(torch.bincount(bucket, minlength=buckets))
    return row_ids.new_tensor([NO_PROBLEM, -1])


def _appeared_before(place: Tensor) -> Tensor:
    """Mask of the entries whose value stands earlier already; values count up from 0 in order of first appearance."""
    if place.numel() == 0:
        return place.bool()
    highest_before = torch.cummax(place, 0).values[:-1]
    return place <= torch.cat([place.new_full([1], -1), highest_before])


@library.when_loaded
def _register_fakes() -> None:
    """Shapes and dtypes of what the operators give back; they depend on the ids, or on the rows, alone."""

    @torch.library.register_fake("recfx::find")
    def _find(ids: Tensor, *rest: object) -> Tensor:
        return torch.empty_like(ids, memory_format=torch.contiguous_format)

    @torch.library.register_fake("recfx::find_tables")
    def _find_tables(ids: Tensor, begins: list[int], *rest: object) -> tuple[Tensor, Tensor]:
        return torch.empty_like(ids, memory_format=torch.contiguous_format), ids.new_empty(len(begins))

    @torch.library.register_fake("recfx::find_or_insert")
    def _find_or_insert(ids: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
        new_rows = ids.new_empty(torch.library.get_ctx().new_dynamic_size())
        return torch.empty_like(ids, memory_format=torch.contiguous_format), new_rows, ids.new_empty(2)

    @torch.library.register_fake("recfx::erase")
    def _erase(ids: Tensor, *rest: object) -> Tensor:
        return torch.empty_like(ids, memory_format=torch.contiguous_format)

    @torch.library.register_fake("recfx::rebuild")
    def _rebuild(slots: Tensor, side_row: Tensor, row_ids: Tensor, *rest: object) -> Tensor:
        return row_ids.new_empty(2)
