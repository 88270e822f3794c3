"""Indexes on a device, where ``insert_rows.py`` gives rows to new ids: copies of those on the host, table by table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.index.index_buffers import COUNTERS, IndexBuffers, IndexPolicy, is_taken
from recfx.kernels.index.mix64 import mix64_integer
from recfx.kernels.index.slot_groups import SLOTS

MOST_BUCKETS = 2**24
"""All tables together may have so many: the device sorts by keys of float32, which hold integers up to here."""


class InsertFacts(NamedTuple):
    """What the kernels have to know of one index: a row of ``DeviceIndexes.facts``, in the order of their constants."""

    slots_start: int = 0  # elements of `slot_groups` before those of the table
    slots: int = 0  # of the table; 0: it has no index, its ids are its rows
    hash_xor: int = 0  # of the seeded hash, see slot_groups.py
    hash_factor: int = 0
    dense_rows: int = 0
    rows: int = 0
    rows_start: int = 0  # the rows of the tables before
    buckets: int = 0
    buckets_start: int = 0  # the buckets of the tables before
    mixed_seed: int = 0
    mixed_next_seed: int = 0
    shares: int = 0  # 1: an id whose bucket is full shares a row; 0: the batch is refused
    marks_new: int = 0  # 1: see IndexPolicy.mark_new


class DeviceIndexes(NamedTuple):
    """The indexes of several tables on one device, one after the other; ``insert_rows_`` changes all but ``facts``."""

    slot_groups: Tensor  # int64 [groups, 8], see slot_groups.py
    side_rows: Tensor  # int64 [tables]: the row of id -1; -1 if it has none
    row_ids: Tensor  # int64 [rows], as are the next four: see IndexBuffers
    row_states: Tensor  # uint8 [rows]
    bucket_taken: Tensor  # int64 [buckets]
    next_free: Tensor  # int64 [buckets]: all rows of the bucket before this one of the table are taken
    counts: Tensor  # int64 [tables, 6]
    facts: Tensor  # int64 [tables, 13]: one InsertFacts per table

    @classmethod
    def of(
        cls, indexes: Sequence[tuple[IndexBuffers, IndexPolicy] | None], device: torch.device | str
    ) -> DeviceIndexes:
        """Copies of indexes as they are now; None for a table without one.

        Raises:
            ValueError: an index evicts, counts candidates, or is a slice of its table; or there are too many buckets.
        """
        facts, pieces = [], []
        groups = rows = buckets = 0
        for index in indexes:
            if index is None:
                facts.append(InsertFacts())
                continue
            buffers, policy = index
            _refuse(policy)
            seed = int(buffers.side_row[1])
            facts.append(
                InsertFacts(
                    slots_start=2 * SLOTS * groups,
                    slots=SLOTS * buffers.slot_groups.shape[0],
                    hash_xor=mix64_integer(seed),
                    hash_factor=mix64_integer(seed + 1) | 1,
                    dense_rows=policy.dense_rows,
                    rows=policy.rows,
                    rows_start=rows,
                    buckets=policy.buckets,
                    buckets_start=buckets,
                    mixed_seed=mix64_integer(policy.seed),
                    mixed_next_seed=mix64_integer(policy.seed + 1),
                    shares=policy.on_full,
                    marks_new=policy.mark_new,
                )
            )
            groups, rows, buckets = groups + buffers.slot_groups.shape[0], rows + policy.rows, buckets + policy.buckets
            pieces.append((buffers, next_free_rows(buffers.row_state, policy)))
        if buckets >= MOST_BUCKETS:
            raise ValueError(f"{buckets} buckets, of at most {MOST_BUCKETS - 1}")
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        side_rows = iter([int(buffers.side_row[0]) for buffers, _ in pieces])
        counts = iter([buffers.counts for buffers, _ in pieces])
        held = cls(
            torch.cat([none.view(0, 2 * SLOTS), *(buffers.slot_groups for buffers, _ in pieces)]),
            torch.tensor([-1 if index is None else next(side_rows) for index in indexes], dtype=torch.int64),
            torch.cat([none, *(buffers.row_ids for buffers, _ in pieces)]),
            torch.cat([none.to(torch.uint8), *(buffers.row_state for buffers, _ in pieces)]),
            torch.cat([none, *(buffers.bucket_taken for buffers, _ in pieces)]),
            torch.cat([none, *(first for _, first in pieces)]),
            torch.stack([none.new_zeros(len(COUNTERS)) if index is None else next(counts) for index in indexes]),
            torch.tensor(facts, dtype=torch.int64),
        )
        return cls(*(tensor.to(device) for tensor in held))


def _refuse(policy: IndexPolicy) -> None:
    if policy.evicts or policy.admits or not policy.is_whole_table:
        raise ValueError("the index evicts, counts candidates, or is a slice of its table")


def next_free_rows(row_state: Tensor, policy: IndexPolicy) -> Tensor:
    """The lowest free row of each bucket, or its end if it has none: int64 ``[buckets]``."""
    free = torch.nonzero(~is_taken(row_state)).squeeze(1)
    borders = [policy.rows_of(bucket) for bucket in policy.own_buckets]
    begins, ends = (torch.tensor(values) for values in zip(*((each.start, each.stop) for each in borders), strict=True))
    places = torch.searchsorted(free, begins)
    lowest = torch.cat([free, ends.new_full((1,), policy.rows)])[places]
    return torch.minimum(lowest, ends)
