"""What an index is made of: its tensors and its rules, in the order in which the operators take them.

All tensors are contiguous and on the CPU; the operators change them in place. The same order, and the same numbers,
stand in ``csrc/index_buffers.h`` and ``csrc/index.h``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .buckets import bucket_begin, bucket_from
from .free_rows import word_count
from .slot_table import slot_count

# States of a row. NEW and RENEWED are taken as well, but the weights are not those of the row's id yet; before that, a
# NEW row was NEVER_USED and a RENEWED one was not. Only an index whose rows somebody initialises has them (see
# IndexPolicy.mark_new).
NEVER_USED, TAKEN, FREED, NEW, RENEWED = 0, 1, 2, 3, 5

# Places in `counts`: batches trained, ids in them, rows given out, rows taken from an id for another one, ids answered
# with a shared row because their bucket was full, ids answered as `unseen` says because they were not admitted.
COUNTERS = ("batches", "ids_seen", "inserted", "evicted", "shared_answers", "unseen_answers")
BATCHES, IDS_SEEN, INSERTED, EVICTED, SHARED_ANSWERS, UNSEEN_ANSWERS = range(6)

# A lfu score is sightings * 2 ** 36 + the number of the batch that used the row last; a lru score that number alone.
BATCH_BITS = 36
MOST_SIGHTINGS = 2**27 - 1
# A candidate's order is the number of the batch that saw it first * 2 ** 31 + which of the batch's new candidates of
# its bucket it was: other buckets do not matter, so that it is the same wherever they are.
NEW_ID_BITS = 31


class IndexPolicy(NamedTuple):
    """What a ``HashConfig`` says, as the operators take it, and which rows of the table the index holds.

    The index holds the rows ``row_begin`` to ``row_end``: all of the table, or a slice whose borders are among the
    dense rows or those of buckets. All row numbers in its tensors are the slice's: a table's row minus ``row_begin``.
    """

    dense_rows: int  # of the table
    seed: int
    on_full: int  # 0 error, 1 share, 2 evict
    evict: int  # 0 lru, 1 lfu
    admit_after: int
    unseen: int  # 0 zeros, 1 share
    rows: int  # of the table
    buckets: int  # of the table
    row_begin: int
    row_end: int
    mark_new: int = 0  # 1: rows that are given out are NEW or RENEWED until mark_initialized

    @property
    def evicts(self) -> bool:
        """Whether rows have scores."""
        return self.on_full == 2

    @property
    def admits(self) -> bool:
        """Whether ids are counted before they get a row."""
        return self.admit_after > 1

    @property
    def is_whole_table(self) -> bool:
        """Whether no row is another slice's."""
        return self.own_rows == self.rows

    @property
    def own_rows(self) -> int:
        """Rows of the slice."""
        return self.row_end - self.row_begin

    @property
    def own_dense_rows(self) -> int:
        """The slice's first rows: those of the ids from ``row_begin`` on."""
        return max(0, min(self.row_end, self.dense_rows) - self.row_begin)

    @property
    def own_index_rows(self) -> int:
        """The slice's other rows, which the index gives out."""
        return self.own_rows - self.own_dense_rows

    @property
    def own_buckets(self) -> range:
        """The table's numbers of the slice's buckets."""
        first, end = (
            bucket_from(row, self.rows, self.dense_rows, self.buckets) for row in (self.row_begin, self.row_end)
        )
        return range(first, end)

    def may_be_border(self, row: int) -> bool:
        """Whether a slice may begin or end at this row of the table."""
        bucket = bucket_from(row, self.rows, self.dense_rows, self.buckets)
        return row <= self.dense_rows or bucket_begin(bucket, self.rows, self.dense_rows, self.buckets) == row

    def rows_of(self, bucket: int) -> range:
        """The slice's rows of one of ``own_buckets``."""
        begin, end = (bucket_begin(b, self.rows, self.dense_rows, self.buckets) for b in (bucket, bucket + 1))
        return range(begin - self.row_begin, end - self.row_begin)


class IndexBuffers(NamedTuple):
    """The tensors of one index; those that its policy has no use for are empty. Rows and buckets are the slice's."""

    slots: Tensor  # int64 [slots, 2]: id to row, see slot_table.py
    side_row: Tensor  # int64 [1]: the row of id -1, which slots cannot hold; -1: none
    row_ids: Tensor  # int64 [rows]: the id that has the row, -1 where it is free
    row_state: Tensor  # uint8 [rows]: NEVER_USED, TAKEN, FREED, NEW or RENEWED
    free_rows: Tensor  # int64 [words]: the free rows, see free_rows.py
    bucket_taken: Tensor  # int64 [buckets]: taken rows in each bucket
    counts: Tensor  # int64 [6]: see COUNTERS
    lock: Tensor  # int64 [1]: see csrc/index_lock.h
    row_scores: Tensor  # int64 [rows]: who is evicted, lowest first
    victims: Tensor  # int64 [entries, 3], victim_heads [buckets, 3]: see csrc/lowest_rows.h
    victim_heads: Tensor
    candidate_slots: Tensor  # int64 [slots, 2], candidate_side_row [1]: id to place, as for rows
    candidate_side_row: Tensor
    candidate_ids: Tensor  # int64 [rows]: the id that is counted at a place, -1 where there is none
    candidate_counts: Tensor  # int32 [rows]: its sightings, 0 where there is none
    candidate_order: Tensor  # int64 [rows]: see NEW_ID_BITS; older is lower
    free_places: Tensor  # int64 [words]: as free_rows
    oldest: Tensor  # int64 [entries, 3], oldest_heads [buckets, 3]: as victims
    oldest_heads: Tensor
    uninitialized: Tensor  # int64 [1]: how many rows are NEW or RENEWED


# What is saved; everything else is derived from it. See hashing/state.py.
STATE = ("row_ids", "row_state", "counts", "row_scores", "candidate_ids", "candidate_counts", "candidate_order")


def allocate_buffers(policy: IndexPolicy, device: str) -> IndexBuffers:
    """Tensors without content, on ``"cpu"`` or ``"meta"``."""
    rows, index_rows, buckets = policy.own_rows, policy.own_index_rows, len(policy.own_buckets)
    entries = index_rows // 16 + buckets  # LowestRows::entries_before in csrc/lowest_rows.h

    def int64(*size: int, wanted: bool = True) -> Tensor:
        return torch.empty(size if wanted else (0, *size[1:]), dtype=torch.int64, device=device)

    return IndexBuffers(
        slots=int64(slot_count(index_rows), 2),
        side_row=int64(1),
        row_ids=int64(rows),
        row_state=torch.empty(rows, dtype=torch.uint8, device=device),
        free_rows=int64(word_count(rows)),
        bucket_taken=int64(buckets),
        counts=int64(len(COUNTERS)),
        lock=int64(1),
        row_scores=int64(rows, wanted=policy.evicts),
        victims=int64(entries, 3, wanted=policy.evicts),
        victim_heads=int64(buckets, 3, wanted=policy.evicts),
        candidate_slots=int64(slot_count(index_rows), 2, wanted=policy.admits),
        candidate_side_row=int64(1, wanted=policy.admits),
        candidate_ids=int64(rows, wanted=policy.admits),
        candidate_counts=torch.empty(rows if policy.admits else 0, dtype=torch.int32, device=device),
        candidate_order=int64(rows, wanted=policy.admits),
        free_places=int64(word_count(rows), wanted=policy.admits),
        oldest=int64(entries, 3, wanted=policy.admits),
        oldest_heads=int64(buckets, 3, wanted=policy.admits),
        uninitialized=int64(1),
    )


def is_taken(row_state: Tensor) -> Tensor:
    """Which rows have an id: bool, of the same shape."""
    return (row_state & 1) == 1


def is_uninitialized(row_state: Tensor) -> Tensor:
    """Which of them have weights that are not their id's yet: bool, of the same shape."""
    return (row_state == NEW) | (row_state == RENEWED)


def flat(values: Sequence[Sequence[object]]) -> list[object]:
    """One list, one table after the other: how the operators take buffers and policies."""
    return [value for each in values for value in each]
