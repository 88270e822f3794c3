"""What an index consists of: its tensors and its rules, in the order in which the operators take them.

All tensors are contiguous and on the CPU; the operators change them in place. ``csrc/index/index_buffers.h`` and
``csrc/index/index.h`` have the same order and the same numbers.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.index.buckets import bucket_begin, bucket_from
from recfx.kernels.index.slot_groups import SLOTS, group_count

# States of a row. NEW and RENEWED rows are taken as well, but do not hold the weights of their ids yet; before it was
# taken, a NEW row was NEVER_USED and a RENEWED row was not. These two states occur only in indexes whose rows are
# initialised (see IndexPolicy.mark_new).
NEVER_USED, TAKEN, FREED, NEW, RENEWED = 0, 1, 2, 3, 5

# Positions in `counts`: batches trained, ids in them, rows given out, rows taken from ids (for others, or because they
# expired), ids answered with a shared row because their bucket was full, ids answered according to `unseen` because
# they were not admitted.
COUNTERS = ("batches", "ids_seen", "inserted", "evicted", "shared_answers", "unseen_answers")
BATCHES, IDS_SEEN, INSERTED, EVICTED, SHARED_ANSWERS, UNSEEN_ANSWERS = range(6)

# An LFU score is sightings * 2 ** 36 + the number of the last batch that used the row; an LRU score is that number
# alone.
BATCH_BITS = 36
MOST_SIGHTINGS = 2**27 - 1
# A candidate's order is the number of the batch that saw it first * 2 ** 31 + its number among that batch's new
# candidates in its bucket. It does not depend on other buckets, and therefore not on where they are stored.
NEW_ID_BITS = 31


class IndexPolicy(NamedTuple):
    """A ``HashConfig`` in the form that the operators take, and which rows of the table the index holds.

    The index holds rows ``row_begin`` to ``row_end`` of the table: all of them, or a slice, whose borders are either
    among the dense rows or at the borders of buckets. All row numbers in its tensors are relative to the slice: the
    table's row minus ``row_begin``.
    """

    dense_rows: int  # of the table
    seed: int
    on_full: int  # 0 error, 1 share, 2 evict
    evict: int  # 0 lru, 1 lfu
    admit_after: int
    unseen: int  # 0 zeros, 1 share, 2 row
    rows: int  # of the table
    buckets: int  # of the table
    row_begin: int
    row_end: int
    mark_new: int = 0  # 1: rows that are given out stay NEW or RENEWED until mark_initialized
    ttl_batches: int = 0  # on_full=2: an id that none of so many batches has seen loses its row; 0: it keeps it

    @property
    def evicts(self) -> bool:
        """Whether rows have scores."""
        return self.on_full == 2

    @property
    def admits(self) -> bool:
        """Whether ids are counted before they are given a row."""
        return self.admit_after > 1

    @property
    def is_whole_table(self) -> bool:
        """Whether the slice is the whole table."""
        return self.own_rows == self.rows

    @property
    def own_rows(self) -> int:
        """The number of rows in the slice."""
        return self.row_end - self.row_begin

    @property
    def own_dense_rows(self) -> int:
        """The number of dense rows at the start of the slice, which belong to the ids from ``row_begin`` on."""
        return max(0, min(self.row_end, self.dense_rows) - self.row_begin)

    @property
    def own_index_rows(self) -> int:
        """The number of the other rows of the slice, which the index gives out."""
        return self.own_rows - self.own_dense_rows

    @property
    def own_buckets(self) -> range:
        """The buckets of the slice, by the table's numbering."""
        first, end = (
            bucket_from(row, self.rows, self.dense_rows, self.buckets) for row in (self.row_begin, self.row_end)
        )
        return range(first, end)

    def may_be_border(self, row: int) -> bool:
        """Whether a slice may begin or end at this row of the table."""
        bucket = bucket_from(row, self.rows, self.dense_rows, self.buckets)
        return row <= self.dense_rows or bucket_begin(bucket, self.rows, self.dense_rows, self.buckets) == row

    def rows_of(self, bucket: int) -> range:
        """The rows of one of ``own_buckets``, relative to the slice."""
        begin, end = (bucket_begin(b, self.rows, self.dense_rows, self.buckets) for b in (bucket, bucket + 1))
        return range(begin - self.row_begin, end - self.row_begin)

    @property
    def kept_rows(self) -> list[int]:
        """The rows that belong to no id, because ids without a row read them, relative to the slice."""
        return [self.rows_of(bucket).stop - 1 for bucket in self.own_buckets] if self.unseen == 2 else []


class IndexBuffers(NamedTuple):
    """The tensors of one index, for the rows and buckets of its slice; those that its policy does not use are empty."""

    slot_groups: Tensor  # int64 [groups, 8]: maps ids to rows, see slot_groups.py
    side_row: Tensor  # int64 [2]: the row of id -1, which slot_groups cannot hold (-1: none); the seed of their hash
    row_ids: Tensor  # int64 [rows]: the id that has the row, -1 if it is free
    row_state: Tensor  # uint8 [rows]: NEVER_USED, TAKEN, FREED, NEW or RENEWED
    free_rows: Tensor  # int64 [words]: the free rows, see csrc/index/free_rows.h
    bucket_taken: Tensor  # int64 [buckets]: the number of taken rows per bucket
    counts: Tensor  # int64 [6]: see COUNTERS
    lock: Tensor  # int64 [1]: see csrc/index/index_lock.h
    row_scores: Tensor  # int64 [rows]: rows are evicted in ascending order
    victims: Tensor  # int64 [entries, 3], victim_heads [buckets, 3]: see csrc/index/lowest_rows.h
    victim_heads: Tensor
    candidate_slot_groups: Tensor  # int64 [groups, 8], candidate_side_row [2]: maps ids to places, as for rows
    candidate_side_row: Tensor
    candidate_ids: Tensor  # int64 [rows]: the id that is counted at each place, -1 if there is none
    candidate_counts: Tensor  # int32 [rows]: the id's sightings, 0 if there is none
    candidate_order: Tensor  # int64 [rows]: see NEW_ID_BITS; older is lower
    free_places: Tensor  # int64 [words]: like free_rows
    oldest: Tensor  # int64 [entries, 3], oldest_heads [buckets, 3]: like victims
    oldest_heads: Tensor
    uninitialized: Tensor  # int64 [1]: how many rows are NEW or RENEWED


class IndexView(NamedTuple):
    """What finding ids needs to know about a table's index."""

    slot_groups: Tensor  # int64 [groups, 8], see slot_groups.py; [0, 8]: there is no index, ids are rows
    side_row: Tensor  # int64 [1]: the row of id -1
    dense_rows: int  # of the table: an id 0 <= id < dense_rows is its own row
    share_buckets: int  # of the table, if an id without a row reads one of its bucket, see shared_rows(); 0: nothing
    seed: int  # of the index
    lock: Tensor | None = None  # of the index; None if nothing writes to it any more
    table_rows: int = 0  # of the table, if the weight and the index are a slice of it; 0: they are the whole table
    row_begin: int = 0  # the table's row at which the slice begins; ids of other slices have no row

    @classmethod
    def none(cls) -> IndexView:
        """The view of a table that has no index."""
        empty = torch.empty(0, 8, dtype=torch.int64, device="cpu")
        return cls(empty, torch.empty(1, dtype=torch.int64, device="cpu"), 0, 0, 0)


# What is saved; everything else is derived from these. See hashing/state.py.
STATE = ("row_ids", "row_state", "counts", "row_scores", "candidate_ids", "candidate_counts", "candidate_order")


def allocate_buffers(policy: IndexPolicy, device: str) -> IndexBuffers:
    """Uninitialised tensors, on ``"cpu"`` or ``"meta"``."""
    rows, index_rows, buckets = policy.own_rows, policy.own_index_rows, len(policy.own_buckets)
    entries = index_rows // 8 + 2 * buckets  # LowestRows::entries_before in csrc/index/lowest_rows.h

    def int64(*size: int, used: bool = True) -> Tensor:
        return torch.empty(size if used else (0, *size[1:]), dtype=torch.int64, device=device)

    return IndexBuffers(
        slot_groups=int64(group_count(index_rows), 2 * SLOTS), side_row=int64(2), row_ids=int64(rows),
        row_state=torch.empty(rows, dtype=torch.uint8, device=device), free_rows=int64(word_count(rows)),
        bucket_taken=int64(buckets), counts=int64(len(COUNTERS)), lock=int64(1),
        row_scores=int64(rows, used=policy.evicts), victims=int64(entries, 3, used=policy.evicts),
        victim_heads=int64(buckets, 3, used=policy.evicts),
        candidate_slot_groups=int64(group_count(index_rows), 2 * SLOTS, used=policy.admits),
        candidate_side_row=int64(2, used=policy.admits), candidate_ids=int64(rows, used=policy.admits),
        candidate_counts=torch.empty(rows if policy.admits else 0, dtype=torch.int32, device=device),
        candidate_order=int64(rows, used=policy.admits), free_places=int64(word_count(rows), used=policy.admits),
        oldest=int64(entries, 3, used=policy.admits), oldest_heads=int64(buckets, 3, used=policy.admits),
        uninitialized=int64(1),
    )  # fmt: skip


def word_count(rows: int) -> int:
    """The words of the tree of bits that is the set of free rows, see csrc/index/free_rows.h."""
    words = (rows + 63) // 64
    return words if words <= 1 else words + word_count(words)


def choose_seeds(buffers: IndexBuffers) -> None:
    """Give the slot groups seeds of their own, which nobody can know; whatever they hold must be inserted again.

    Nothing that an index does depends on them, except for how long it takes. torch's random numbers are not used up.
    """
    for side_row in (buffers.side_row, buffers.candidate_side_row):
        if side_row.numel() > 0:
            side_row[1:].fill_(secrets.randbits(64) - 2**63)


def is_taken(row_state: Tensor) -> Tensor:
    """Which rows have an id: bool, of the shape of ``row_state``."""
    return (row_state & 1) == 1


def is_uninitialized(row_state: Tensor) -> Tensor:
    """Which rows have an id but do not hold its weights yet: bool, of the shape of ``row_state``."""
    return (row_state == NEW) | (row_state == RENEWED)


def flat(tables: Sequence[Sequence[object]]) -> list[object]:
    """Concatenate the lists of all tables: the form in which the operators take buffers and policies."""
    return [value for table in tables for value in table]
