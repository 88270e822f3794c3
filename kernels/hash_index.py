"""Operators of the hash index: which row of a table belongs to which raw 64-bit id.

Each function calls the C++ operator of its name (``torch.ops.recfx.*``, ``csrc/hash_index.cpp``), which has to be
loaded (``library.load()``). The references of the same contracts are in ``hash_index_reference.py``. Everything is on
the CPU. What an index is made of is said in ``index_buffers.py``.

Ids ``0 <= id < dense_rows`` are their own row and are in no index. Every other id belongs to one bucket and takes the
lowest free row of it. An index holds all rows of its table, or a slice of them (see ``IndexPolicy``): its row numbers
are then the slice's.

Readers of one index run together, a writer alone: ``find`` and ``find_tables`` wait for a running ``find_or_insert`` or
``erase``, and the other way round. The lock is the C++ operators'; the references are for one thread.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import library
from .index_buffers import IndexBuffers, IndexPolicy, flat

FINDS_ON_ANY_THREAD = True
"""Whether ``find_tables`` may run on one thread while another inserts into the same indexes."""

_LATER_THAN_ANY = 2**62  # number of a batch


class InFlight(NamedTuple):
    """Rows of one table that must keep their ids.

    Args:
        oldest: all rows that batches from this number on use.
        rows: int64, rows of earlier batches, one by one; any order, repeats and negative numbers allowed.
        oldest_listed: number of the oldest batch among those.
    """

    oldest: int
    rows: Tensor
    oldest_listed: int

    @classmethod
    def since(cls, oldest: int) -> InFlight:
        """All rows that batches from number ``oldest`` on use."""
        return cls(oldest, torch.empty(0, dtype=torch.int64, device="cpu"), _LATER_THAN_ANY)

    @classmethod
    def nothing(cls) -> InFlight:
        """Only the rows of the batch itself stay."""
        return cls.since(_LATER_THAN_ANY)


class Inserted(NamedTuple):
    """What ``find_or_insert`` gives back."""

    rows: Tensor
    new_rows: Tensor
    states_before: Tensor
    ids_before: Tensor
    report: Tensor


def find(
    ids: Tensor, slots: Tensor, side_row: Tensor, dense_rows: int, lock: Tensor | None = None, dense_begin: int = 0
) -> Tensor:
    """The row of each id, -1 where it has none. Reads only, on all threads.

    Args:
        ids: int64 ``[n]``.
        slots, side_row: see ``IndexBuffers``.
        dense_rows: of the slice that the index holds; they come first.
        lock: of the index; None where nobody writes it any more.
        dense_begin: the id of the first of them; the others follow.

    Returns:
        int64 ``[n]``.
    """
    return torch.ops.recfx.find(ids, slots, side_row, dense_rows, lock, dense_begin)


def find_tables(
    ids: Tensor,
    begins: list[int],
    ends: list[int],
    slots: list[Tensor],
    side_rows: list[Tensor],
    locks: list[Tensor],
    dense_rows: list[int],
    dense_begins: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """``find`` for several tables at once, each on its own stretch of ``ids``. Waits for writers of these tables.

    Args:
        ids: int64 ``[n]``.
        begins, ends: where the ids of each table begin and end; ids outside every stretch come back as they are.
        slots, side_rows, locks, dense_rows, dense_begins: of each table; ``dense_begins`` of None: all begin at 0.

    Returns:
        rows: int64 ``[n]``, -1 where a table does not hold the id.
        absent: int64 ``[tables]``, how many of those each table has.
    """
    return torch.ops.recfx.find_tables(ids, begins, ends, slots, side_rows, locks, dense_rows, dense_begins)


def find_or_insert(
    ids: Tensor,
    begins: list[int],
    ends: list[int],
    buffers: list[IndexBuffers],
    policies: list[IndexPolicy],
    in_flight: list[InFlight],
) -> Inserted:
    """One batch of training for several tables, each on its own stretch of ``ids``: all of them, or none.

    Ids without a row are taken in order of first appearance. With ``admit_after > 1`` an id's sightings of this batch
    are added to those before; below ``admit_after`` it stays a candidate. Any other gets the lowest free row of its
    bucket, which is ``NEW`` or ``RENEWED`` from then on where ``IndexPolicy.mark_new`` says so. Where there is none
    ``on_full`` decides: the lowest of the rows that no batch in flight uses, by (score, ``mix64(id)``), is taken from
    its id; or the answer is a row of the bucket by hash; or nothing changes in any table and ``report`` names the
    bucket. The result does not depend on the number of threads. The cost is linear in ids, and
    nothing as large as a table is allocated (the reference does read whole buckets).

    Args:
        ids: int64 ``[n]``.
        begins, ends: where the ids of each table begin and end; ids outside every stretch come back as they are.
        buffers, policies: of each table.
        in_flight: of each table; rows of this batch stay in any case.

    Returns:
        rows: int64 ``[n]``; -1 for an id that is not admitted and reads zeros, ``-row - 2`` for one that reads a shared
            row without training it. -1 throughout if a bucket is full.
        new_rows: int64, the rows given out, table by table, in the order in which they were.
        states_before: uint8, as long: what each of them was (``TAKEN``, never ``NEW`` or ``RENEWED``: it was evicted).
        ids_before: int64, as long: whose it was, if it was evicted.
        report: int64 ``[tables, 2]``: how many rows each table gave out, and its bucket (by the table's number) that is
            full, -1 if none is.

    Raises:
        RuntimeError: an id belongs to another slice of its table; nothing has changed.
    """
    oldest, listed, oldest_listed = map(list, zip(*in_flight, strict=True)) if in_flight else ([], [], [])
    arguments = (flat(buffers), flat(policies), oldest, listed, oldest_listed)
    return Inserted(*torch.ops.recfx.find_or_insert(ids, begins, ends, *arguments))


def add_counts(counts: list[Tensor], amounts: list[int]) -> None:
    """Add to the counts of several tables at once.

    Args:
        counts: int64 ``[k]`` of each table.
        amounts: for each of these numbers, table by table.
    """
    torch.ops.recfx.add_counts(counts, amounts)


def mark_initialized(
    buffers: list[IndexBuffers], policies: list[IndexPolicy], rows: Tensor, begins: list[int], ends: list[int]
) -> None:
    """Rows that ``find_or_insert`` has marked (``IndexPolicy.mark_new``) have the weights of their ids now.

    All tables at once. Rows that are not marked stay as they are.

    Args:
        buffers, policies: of each table.
        rows: int64 ``[n]``.
        begins, ends: where the rows of each table begin and end.
    """
    torch.ops.recfx.mark_initialized(flat(buffers), flat(policies), rows, begins, ends)


def erase(ids: Tensor, buffers: IndexBuffers, policy: IndexPolicy) -> Tensor:
    """Take the rows of these ids back, and forget their sightings; ids below ``dense_rows`` are left alone.

    Returns:
        int64 ``[n]``: the row that each id had, -1 where it had none (or appeared before in ``ids``).
    """
    return torch.ops.recfx.erase(ids, list(buffers), list(policy))


@library.when_loaded
def _register_fakes() -> None:
    """Shapes and dtypes of what the operators give back; they depend on the ids alone."""

    @torch.library.register_fake("recfx::find")
    def _find(ids: Tensor, *rest: object) -> Tensor:
        return torch.empty_like(ids, memory_format=torch.contiguous_format)

    @torch.library.register_fake("recfx::find_tables")
    def _find_tables(ids: Tensor, begins: list[int], *rest: object) -> tuple[Tensor, Tensor]:
        return torch.empty_like(ids, memory_format=torch.contiguous_format), ids.new_empty(len(begins))

    @torch.library.register_fake("recfx::find_or_insert")
    def _find_or_insert(ids: Tensor, begins: list[int], *rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        count = torch.library.get_ctx().new_dynamic_size()
        new_rows, ids_before = ids.new_empty(count), ids.new_empty(count)
        states_before = torch.empty(count, dtype=torch.uint8, device=ids.device)
        rows = torch.empty_like(ids, memory_format=torch.contiguous_format)
        return rows, new_rows, states_before, ids_before, ids.new_empty(len(begins), 2)

    @torch.library.register_fake("recfx::add_counts")
    def _add_counts(counts: list[Tensor], amounts: list[int]) -> None:
        return None

    @torch.library.register_fake("recfx::mark_initialized")
    def _mark_initialized(buffers: list[Tensor], *rest: object) -> None:
        return None

    @torch.library.register_fake("recfx::erase")
    def _erase(ids: Tensor, *rest: object) -> Tensor:
        return torch.empty_like(ids, memory_format=torch.contiguous_format)
