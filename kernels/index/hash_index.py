"""Operators of the hash index: which row of a table belongs to which raw 64-bit id.

Each function calls the operator of the same name, which runs in C++ (``csrc/index``). All tensors are on
the CPU. ``index_buffers.py`` describes the tensors of an index.

An id ``0 <= id < dense_rows`` is its own row and is in no index. Every other id belongs to one bucket and takes the
bucket's lowest free row. An index holds all rows of its table, or a slice of them (see ``IndexPolicy``); its row
numbers are then relative to the slice.

Readers of one index may run at the same time; a writer runs alone: ``find`` and ``find_tables`` wait for a running
``find_or_insert`` or ``erase``, and the other way round.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build import library
from recfx.kernels.index.index_buffers import IndexBuffers, IndexPolicy, flat

_LATER_THAN_ANY = 2**62  # a batch number


class InFlight(NamedTuple):
    """Rows of one table that must keep their ids."""

    oldest: int  # all rows that are used by batches from this number on
    # int64, the individual rows that earlier batches use, in any order; repeats and negative numbers are allowed
    rows: Tensor
    oldest_listed: int  # the number of the oldest of these earlier batches

    @classmethod
    def since(cls, oldest: int) -> InFlight:
        """All rows that are used by batches from number ``oldest`` on."""
        return cls(oldest, torch.empty(0, dtype=torch.int64, device="cpu"), _LATER_THAN_ANY)

    @classmethod
    def nothing(cls) -> InFlight:
        """Only the rows of the batch itself must keep their ids."""
        return cls.since(_LATER_THAN_ANY)


class Inserted(NamedTuple):
    """What ``find_or_insert`` returns."""

    rows: Tensor
    new_rows: Tensor
    states_before: Tensor
    ids_before: Tensor
    report: Tensor
    expired_ids: Tensor


def find(
    ids: Tensor,
    slot_groups: Tensor,
    side_row: Tensor,
    dense_rows: int,
    lock: Tensor | None = None,
    dense_begin: int = 0,
) -> Tensor:
    """The row of each id, int64 ``[n]``, -1 if it has none. Only reads, on all threads.

    ``dense_rows`` rows of the slice, the first ones, are dense, with ids from ``dense_begin`` on. ``lock`` is None if
    nothing writes to the index any more; for the rest, see ``IndexBuffers``.
    """
    return library.operators().find(ids, slot_groups, side_row, dense_rows, lock, dense_begin)


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
    """``find`` for several tables at once, each with its own range of ``ids``. Waits for writers of these tables.

    Args:
        begins, ends: where the ids of each table begin and end; ids outside every range are returned unchanged.
        slot_groups, side_rows, locks, dense_rows, dense_begins: one per table; if ``dense_begins`` is None, all are 0.

    Returns:
        rows: int64 ``[n]``, -1 if the table does not hold the id.
        absent: int64 ``[tables]``, the number of such ids per table.
    """
    return library.operators().find_tables(ids, begins, ends, slot_groups, side_rows, locks, dense_rows, dense_begins)


def slot_tables_(
    all_slots: Tensor,
    all_side_rows: Tensor,
    slot_counts: list[int],
    row_ids: list[Tensor],
    row_states: list[Tensor],
    locks: list[Tensor],
) -> None:
    """Write several indexes as slot tables (``slot_table.py``), one after the other, as they are between two changes.

    Equal states give equal tables, whatever happened to the indexes before.

    Args:
        all_slots: int64 ``[slots of all tables, 2]``, filled.
        all_side_rows: int64 ``[tables]``, filled: the rows of id -1.
        slot_counts: the slots of each table, a power of two and more than it has ids.
        row_ids, row_states, locks: one per table. Waits for writers of these tables.
    """
    library.operators().slot_tables_(all_slots, all_side_rows, slot_counts, row_ids, row_states, locks)


def take_slots_(taken: Tensor, slot_counts: list[int], ids: Tensor, ends: list[int]) -> Tensor:
    """Take an empty slot for each of ``ids``, int64 ``[n]``, in slot tables that are elsewhere; each has to keep one.

    The ids are different and new, table by table until its end. ``taken``, uint8 ``[slots of all tables]``, says which
    slots have an id, and is changed. Returns int64 ``[n]``, numbered through all tables; for id -1, which has no slot,
    its table's number behind all slots.
    """
    slots: Tensor = library.operators().take_slots_(taken, slot_counts, ids, ends)
    return slots


def find_or_insert(
    ids: Tensor,
    begins: list[int],
    ends: list[int],
    buffers: list[IndexBuffers],
    policies: list[IndexPolicy],
    in_flight: list[InFlight],
) -> Inserted:
    """Take several tables through one training batch, each with its own range of ``ids``: all tables, or none.

    With ``ttl_batches``, ids that none of so many batches before this one has seen lose their rows first, except for
    rows that batches in flight use. They have lost them even if a bucket is then full: the batch
    that takes its place would expire the same ids.

    Ids without a row are handled in the order in which they first appear. With ``admit_after > 1``, an id's sightings
    in this batch are added to its earlier ones, and below ``admit_after`` it remains a candidate. Any other id gets the
    lowest free row of its bucket, and if ``IndexPolicy.mark_new`` is set, that row becomes ``NEW`` or ``RENEWED``. If
    the bucket has no free row, ``on_full`` decides: evict the lowest row, by (score, ``mix64(id)``), that no batch in
    flight uses; answer with a row of the bucket chosen by hash; or change nothing in any table and name the bucket in
    ``report``. The result does not depend on the number of threads. The cost is linear in the number of ids, and
    nothing as large as a table is allocated.

    Args:
        ids: int64 ``[n]``.
        begins, ends: where the ids of each table begin and end; ids outside every range are returned unchanged.
        buffers, policies: one per table.
        in_flight: one per table; rows of this batch keep their ids in any case.

    Returns:
        rows: int64 ``[n]``; -1 for an id that is not admitted and reads zeros, ``-row - 2`` for one that reads a shared
            row without training it. All are -1 if a bucket is full.
        new_rows: int64, the rows that were given out, table by table, in the order in which they were given out.
        states_before: uint8, one per new row: its state before (``TAKEN``, never ``NEW`` or ``RENEWED``, if it was
            evicted).
        ids_before: int64, one per new row: the id that it was taken from, if it was evicted.
        report: int64 ``[tables, 2]``: how many rows each table gave out, and which of its buckets is full, by the
            table's numbering (-1 if none is).
        expired_ids: int64, the ids that expired, table by table and bucket by bucket, in the order in which ids are
            evicted.

    Raises:
        RuntimeError: an id belongs to a different slice of its table; nothing has changed.
    """
    kept = map(list, zip(*in_flight, strict=True)) if in_flight else ([], [], [])
    return Inserted(*library.operators().find_or_insert(ids, begins, ends, flat(buffers), flat(policies), *kept))


def add_counts(counts: list[Tensor], amounts: list[int]) -> None:
    """Add ``amounts``, as many for each table, to the first numbers of the counts, int64 ``[k]``, of several tables."""
    library.operators().add_counts(counts, amounts)


def any_nonzero(cells: list[Tensor]) -> bool:
    """Whether any of several tables' numbers is not 0.

    Args:
        cells: int64 ``[1]`` each.
    """
    return bool(library.operators().any_nonzero(cells))


def mark_initialized(
    buffers: list[IndexBuffers], policies: list[IndexPolicy], rows: Tensor, begins: list[int], ends: list[int]
) -> None:
    """Record that rows which ``find_or_insert`` marked (``IndexPolicy.mark_new``) now hold the weights of their ids.

    Works on all tables at once. Rows that are not marked stay as they are.

    Args:
        buffers, policies: one per table.
        rows: int64 ``[n]``.
        begins, ends: where the rows of each table begin and end.
    """
    library.operators().mark_initialized(flat(buffers), flat(policies), rows, begins, ends)


def erase(ids: Tensor, buffers: IndexBuffers, policy: IndexPolicy) -> Tensor:
    """Free the rows of these ids, and forget their sightings; ids below ``dense_rows`` are left alone.

    Returns:
        int64 ``[n]``: the row that each id had, -1 if it had none (or appears earlier in ``ids``).
    """
    return library.operators().erase(ids, list(buffers), list(policy))


# What can be wrong with a row; csrc/index/index_rebuild.cpp has the same numbers.
NO_PROBLEM, UNKNOWN_STATE, DENSE_ROW, DENSE_ID, WRONG_BUCKET, DUPLICATE_ID, BAD_SCORE = range(7)


class Rebuilt(NamedTuple):
    """What ``rebuild`` found."""

    problem: int  # ``NO_PROBLEM`` or another of the numbers above
    row: int  # the lowest row (or place of a candidate) that has the problem; -1 if there is no problem
    is_candidate: bool  # whether ``row`` is the place of a candidate for admission


def rebuild(buffers: IndexBuffers, policy: IndexPolicy) -> Rebuilt:
    """Rebuild everything that is derived from an index's state, and detect whatever is wrong with the state.

    It checks the state (``index_buffers.STATE``) and fills all other buffers from it, except for the hashes' seeds.

    The seeds are those in ``side_row`` and ``candidate_side_row``; see ``index_buffers.choose_seeds``.

    If there is a problem, the other buffers hold garbage afterwards.
    """
    problem, row, is_candidate = library.operators().rebuild(list(buffers), list(policy)).tolist()
    return Rebuilt(problem, row, bool(is_candidate))


# Shapes and dtypes of what the operators return; they depend only on the ids.


@library.fake("find", "erase")
def _rows(ids: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(ids, memory_format=torch.contiguous_format)


@library.fake("take_slots_")
def _slots(taken: Tensor, slot_counts: list[int], ids: Tensor, ends: list[int]) -> Tensor:
    return torch.empty_like(ids)


@library.fake("find_tables")
def _find_tables(ids: Tensor, begins: list[int], *rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids, memory_format=torch.contiguous_format), ids.new_empty(len(begins))


@library.fake("find_or_insert")
def _find_or_insert(ids: Tensor, begins: list[int], *rest: object) -> tuple[Tensor, ...]:
    count, expired = torch.library.get_ctx().new_dynamic_size(), torch.library.get_ctx().new_dynamic_size()
    new_rows, ids_before = ids.new_empty(count), ids.new_empty(count)
    states_before = torch.empty(count, dtype=torch.uint8, device=ids.device)
    rows = torch.empty_like(ids, memory_format=torch.contiguous_format)
    return rows, new_rows, states_before, ids_before, ids.new_empty(len(begins), 2), ids.new_empty(expired)


@library.fake("any_nonzero")
def _any_nonzero(cells: list[Tensor]) -> Tensor:
    return cells[0].new_empty((), dtype=torch.bool)


@library.fake("rebuild")
def _rebuilt(buffers: list[Tensor], policy: list[int]) -> Tensor:
    return buffers[0].new_empty(3)
