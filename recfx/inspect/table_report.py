"""The report of one table as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from recfx.errors import Diagnostic
from recfx.hashing import HashIndex, ResolvedHashConfig
from recfx.hashing.storage import EVAL_COUNTERS
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.kernels.index.buckets import bucket_begins
from recfx.kernels.index.index_buffers import COUNTERS


@dataclass(frozen=True)
class ShardReport:
    """A rectangle of a table on one rank: first rows and columns, and those after the last; ``bytes`` of weights."""

    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    bytes: int


@dataclass(frozen=True)
class ShardingReport:
    """One table on several ranks, as one of them sees it.

    Args:
        sharding_type: one of TorchRec's.
        compute_kernel: ``"fused"`` or ``"dense"``.
        group: how its pooled rows are sent: ``"table_wise"`` (all-to-all), ``"row_wise"`` (sums over all ranks),
            ``"table_row_wise"`` (sums within a host, then all-to-all across hosts) or ``"data_parallel"`` (not at all).
        travels: the same in words, and in which precision, if they are quantized.
        is_replicated: whether every rank has all of the table.
        rank: this rank.
        world_size: number of ranks.
        shards: all shards, by columns, then by rows.
        rows_here: number of rows of which this rank has some columns.
        columns_here: number of columns that it has of these rows.
        bytes_here: size of this rank's weights.
    """

    sharding_type: str
    compute_kernel: str
    group: str
    travels: str
    is_replicated: bool
    rank: int
    world_size: int
    shards: tuple[ShardReport, ...]
    rows_here: int
    columns_here: int
    bytes_here: int

    @classmethod
    def of(cls, table: ShardedTable, sharding: CollectionSharding, element_bytes: int) -> ShardingReport:
        """One table of ``sharding``; ``element_bytes`` is the size of one weight."""
        shards = tuple(
            ShardReport(shard.rank, shard.rows, shard.columns, shard.num_rows * shard.num_columns * element_bytes)
            for shard in table.shards
        )
        here = [shard for shard in shards if shard.rank == sharding.rank and shard.bytes]
        wires = dict.fromkeys(str(wire) for wire in table.way_back.wires_of(sharding.wires) if wire is not None)
        return cls(
            sharding_type=table.type.name,
            compute_kernel=table.compute_kernel,
            group=table.way_back.name,
            travels=", ".join([table.way_back.wording, *wires]),
            is_replicated=table.is_replicated,
            rank=sharding.rank,
            world_size=sharding.world_size,
            shards=shards,
            rows_here=max((shard.rows[1] - shard.rows[0] for shard in here), default=0),
            columns_here=sum(shard.columns[1] - shard.columns[0] for shard in here),
            bytes_here=sum(shard.bytes for shard in here),
        )


@dataclass(frozen=True)
class HashingReport:
    """How the ids of a table become rows.

    What an index holds and has counted is about ``rows_here``: on a rank with a slice of a table, about that slice.

    Args:
        mode: ``"static"`` (ids are rows, as in the standard collection), ``"adopted"`` (ids are rows, range-checked) or
            ``"index"`` (raw ids get rows). The other fields are None, or empty, if they have no meaning.
        rows: number of physical rows.
        dense_rows: ids below this number are their own row.
        buckets: number of buckets that the other rows are divided into.
        on_full: what happens to a new id whose bucket is full.
        evict: which id is evicted; ``""`` if ids are not evicted.
        ttl_batches: after how many batches without a sighting ids expire; None if they do not.
        admit_after: sightings before an id gets a row.
        unseen: what an id without a row reads in eval mode, or before it is admitted.
        seed: the seed of buckets, shared rows and initial rows.
        ids_held: ids that have a row in the index; None on meta, as are the fields that follow.
        index_rows: number of rows that the index gives out.
        occupancy: share of these that are taken.
        worst_bucket: number of the fullest bucket.
        worst_bucket_occupancy: share of that bucket's rows that are taken.
        full_bucket: the bucket that has stopped training, if no batch was trained since.
        counters: what has happened so far; see :attr:`HashIndex.counters`.
        trained: the same in training alone.
        evaluated: the ids seen, and those without a row, in eval mode.
        candidates: number of ids that were seen but not admitted; None with ``admit_after=1``.
        forgets_candidates: whether a bucket counts as many of them as it can.
        longest_probe: number of slot groups (cache lines) that the slowest lookup reads.
        index_bytes: size of the index, without the weight.
        rows_here: number of rows of the table that the index covers.
    """

    mode: str
    rows: int | None = None
    dense_rows: int | None = None
    buckets: int | None = None
    on_full: str = ""
    evict: str = ""
    ttl_batches: int | None = None
    admit_after: int | None = None
    unseen: str = ""
    seed: int | None = None
    ids_held: int | None = None
    index_rows: int | None = None
    occupancy: float | None = None
    worst_bucket: int | None = None
    worst_bucket_occupancy: float | None = None
    full_bucket: int | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    trained: Mapping[str, int] = field(default_factory=dict)
    evaluated: Mapping[str, int] = field(default_factory=dict)
    candidates: int | None = None
    forgets_candidates: bool = False
    longest_probe: int | None = None
    index_bytes: int | None = None
    rows_here: int | None = None

    def count(self, counter: str) -> int:
        """One of the counters; 0 without an index that holds data."""
        return self.counters.get(counter, 0)

    @classmethod
    def of(cls, config: ResolvedHashConfig | None, index: HashIndex | None = None) -> HashingReport:
        """What the settings of a table say, and what its index holds; without one, or on meta, the settings alone."""
        if config is None:
            return cls("static")
        if not config.has_index:
            return cls("adopted", rows=config.rows, dense_rows=config.dense_rows)
        settings = cls(
            "index",
            rows=config.rows,
            dense_rows=config.dense_rows,
            buckets=config.buckets,
            on_full=config.on_full,
            evict=config.evict if config.evicts else "",
            ttl_batches=config.ttl_batches if config.evicts else None,
            admit_after=config.admit_after,
            unseen=config.unseen,
            seed=config.seed,
        )
        return settings if index is None or index.bucket_taken.is_meta else settings._with(index)

    def _with(self, index: HashIndex) -> HashingReport:
        config, policy, buffers, occupancy = index.config, index.policy, index.index_buffers(), index.occupancy()
        own = policy.own_buckets
        borders = torch.arange(own.start, own.start + len(own) + 1, device=buffers.bucket_taken.device)
        begins = bucket_begins(borders, config.rows, config.dense_rows, config.buckets) - policy.row_begin
        counters, trained = index.counters, dict(zip(COUNTERS, buffers.counts.tolist(), strict=True))
        full = index.full_at
        is_full = full is not None and full[:2] == (index.adopted.times, trained["batches"])
        places = torch.nonzero(buffers.candidate_counts).squeeze(1) if config.admits else buffers.bucket_taken[:0]
        waiting = torch.bincount(torch.searchsorted(begins, places, right=True) - 1, minlength=len(own))
        return replace(
            self,
            ids_held=occupancy.taken,
            index_rows=occupancy.rows,
            occupancy=occupancy.taken / max(occupancy.rows, 1),
            worst_bucket=occupancy.worst_bucket if own else None,
            worst_bucket_occupancy=occupancy.worst_bucket_taken / max(occupancy.worst_bucket_rows, 1),
            full_bucket=full[2] if full is not None and is_full else None,
            counters=counters,
            trained=trained,
            evaluated=dict(zip(EVAL_COUNTERS, index.fold_eval_counts().tolist(), strict=True)),
            candidates=places.numel() if config.admits else None,
            forgets_candidates=config.admits and bool((waiting == begins.diff()).any()),
            longest_probe=index.longest_probe(),
            index_bytes=sum(tensor.numel() * tensor.element_size() for tensor in buffers),
            rows_here=policy.own_rows,
        )


DENSE = "none: gradients to weight.grad"
"""What updates a table of which an optimizer that the user steps reads a dense gradient."""


@dataclass(frozen=True, repr=False)
class TableReport:
    """One table.

    Args:
        name: as in its config.
        features: keys of the batch that read it.
        embedding_names: their keys in the output.
        rows: number of physical rows.
        dim: number of columns.
        pooling: ``"SUM"`` or ``"MEAN"``; ``""`` if the collection does not pool.
        dtype: dtype of the weight.
        device: device of the weight; ``""`` if the collection does not show it.
        bytes: size of the weight.
        hashing: how ids become rows; None in a collection that was not converted.
        kernel: the backend that serves its lookup; ``""`` in a collection that was not converted.
        kernels_passed_over: the backends that come before it, and why they were not taken.
        optimizer: what updates it: ``"none: gradients to weight.grad"``, ``"fused <rule>"``, or
            ``"in backward, not fused: <reason>"``.
        custom_init_fn: whether it has its own ``init_fn``, which fills new rows.
        reasons: the report's reasons that are about this table.
        sharding: where its parts are; None if it is not sharded. ``rows``, ``dim`` and ``bytes`` are those of the whole
            table; ``device``, ``kernel`` and ``optimizer`` are those of this rank's part, ``""`` if it has no part.
    """

    name: str
    features: tuple[str, ...]
    embedding_names: tuple[str, ...]
    rows: int
    dim: int
    pooling: str
    dtype: str
    device: str
    bytes: int
    hashing: HashingReport | None = None
    kernel: str = ""
    kernels_passed_over: tuple[Diagnostic, ...] = ()
    optimizer: str = ""
    custom_init_fn: bool = False
    reasons: tuple[Diagnostic, ...] = ()
    sharding: ShardingReport | None = None

    def __repr__(self) -> str:
        hashing = "" if self.hashing is None else f", {self.hashing.mode}"
        return f"TableReport({self.name!r}, {self.rows:,} rows of {self.dim} {self.dtype}{hashing})"

    @property
    def has_dense_gradient(self) -> bool:
        """Whether backward writes a gradient as large as its part here."""
        return self.optimizer == DENSE

    @property
    def bytes_here(self) -> int:
        """The size of this rank's part of the weight."""
        return self.bytes if self.sharding is None else self.sharding.bytes_here
