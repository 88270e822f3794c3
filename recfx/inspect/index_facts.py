"""What can be read from an index without changing it: how full it is, what it has counted, how many ids wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recfx.hashing import HashIndex, Occupancy, ResolvedHashConfig
from recfx.hashing.storage import EVAL_COUNTERS
from recfx.hashing.usable_share import expected_room, usable_share
from recfx.kernels.buckets import bucket_begins
from recfx.kernels.index_buffers import COUNTERS, IndexBuffers

_ORDER_BITS = 31  # candidate_order is batch * 2 ** 31 + which of its new ids


@dataclass(frozen=True)
class Candidates:
    """Ids that were seen but not admitted.

    Args:
        waiting: how many.
        full_bucket: a bucket that is counting as many ids as it can, so that a new id there makes it forget the oldest;
            None if there is no such bucket.
        batches: how many batches ago the oldest id of that bucket was first seen; 0 without such a bucket.
    """

    waiting: int
    full_bucket: int | None = None
    batches: int = 0


@dataclass(frozen=True)
class IndexFacts:
    """One index, of a table or of a slice of one.

    The counts are those of the slice; what was counted before the table was cut there is its share of that.

    Args:
        config: the config of the whole table.
        rows: number of rows of the table that the index covers, including dense rows.
        index_rows: number of these rows that the index gives out.
        buckets: number of buckets that these rows are divided into; 0 in a slice of dense rows.
        occupancy: how full it is.
        counters: of training and eval together.
        trained: the same counters, training alone.
        evaluated: ``ids_seen``, ``shared_answers`` and ``unseen_answers`` in eval mode.
        candidates: None with ``admit_after=1``.
        longest_probe: slot groups (cache lines) that the slowest lookup reads.
        bytes: size of all its tensors.
        usable_share: share of its rows that are expected to be taken when the first id meets a full bucket.
        room: number of new ids that are expected to fit from here on before one meets a full bucket.
    """

    config: ResolvedHashConfig
    rows: int
    index_rows: int
    buckets: int
    occupancy: Occupancy
    counters: dict[str, int]
    trained: dict[str, int]
    evaluated: dict[str, int]
    candidates: Candidates | None
    longest_probe: int
    bytes: int
    usable_share: float
    room: float

    @classmethod
    def of(cls, index: HashIndex) -> IndexFacts | None:
        """The facts of one index; None if it is on the meta device and holds nothing."""
        if index.bucket_taken.is_meta:
            return None
        config, policy, buffers = index.config, index.policy, index.index_buffers()
        own = policy.own_buckets
        borders = torch.arange(own.start, own.start + len(own) + 1)
        begins = bucket_begins(borders, config.rows, config.dense_rows, config.buckets) - policy.row_begin
        return cls(
            config=config,
            rows=policy.own_rows,
            index_rows=policy.own_index_rows,
            buckets=len(own),
            occupancy=index.occupancy(),
            counters=index.counters,
            trained=dict(zip(COUNTERS, buffers.counts.tolist(), strict=True)),
            evaluated=dict(zip(EVAL_COUNTERS, index.fold_eval_counts().tolist(), strict=True)),
            candidates=_candidates(buffers, begins, own.start) if config.admits else None,
            longest_probe=index.longest_probe(),
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in buffers),
            usable_share=usable_share(policy.own_index_rows, len(own)) if own else 1.0,
            room=expected_room(begins.diff() - buffers.bucket_taken) if own else 0.0,
        )

    @property
    def part(self) -> float:
        """The share of the rows that the whole table gives out."""
        return self.index_rows / self.config.index_rows


def _candidates(buffers: IndexBuffers, begins: Tensor, first_bucket: int) -> Candidates:
    """How full the buckets are; ``begins``: where each begins among the index's rows, and where the last one ends."""
    places = torch.nonzero(buffers.candidate_counts).squeeze(1)
    bucket = torch.searchsorted(begins, places, right=True) - 1
    waiting = torch.bincount(bucket, minlength=begins.numel() - 1)
    full = torch.nonzero(waiting == begins.diff()).squeeze(1).tolist()
    if not full:
        return Candidates(places.numel())
    first_seen = buffers.candidate_order[begins[full[0]] : begins[full[0] + 1]].min() >> _ORDER_BITS
    return Candidates(
        places.numel(), first_bucket + full[0], int(buffers.counts[COUNTERS.index("batches")] - first_seen)
    )
