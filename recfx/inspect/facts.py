"""Everything that is known about one table of a converted collection: the report and its reasons are made from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import ShardedCollection
from recfx.errors import ConversionError, Diagnostic
from recfx.hashing import HashIndex, Occupancy, ResolvedHashConfig
from recfx.hashing.expected_room import expected_room
from recfx.hashing.storage import EVAL_COUNTERS
from recfx.ir.tables import TableSpec
from recfx.kernels.index.buckets import bucket_begins
from recfx.kernels.index.index_buffers import COUNTERS, IndexBuffers
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import fused_optimizer_of
from recfx.runtime import Lookup

_ORDER_BITS = 31  # candidate_order is batch * 2 ** 31 + which of its new ids


@dataclass(frozen=True)
class Candidates:
    """Ids that were seen but not admitted."""

    waiting: int
    full_bucket: int | None = None  # one that counts as many ids as it can: a new one makes it forget the oldest
    batches: int = 0  # how many batches ago the oldest id of that bucket was first seen


@dataclass(frozen=True)
class IndexFacts:
    """One index, of a table or of a slice of one; see also :class:`recfx.inspect.HashingReport`.

    The counts are the slice's, with its share of what was counted before the table was cut there. Batches are those of
    the model: an index that several tables share counts each of their lookups as one.
    """

    config: ResolvedHashConfig  # of the whole table
    rows: int  # of the table that the index covers, dense rows included
    index_rows: int  # the rows among them that the index gives out
    buckets: int  # 0 in a slice of dense rows
    occupancy: Occupancy
    counters: dict[str, int]  # of training and eval together
    trained: dict[str, int]  # the same counters, training alone
    evaluated: dict[str, int]  # EVAL_COUNTERS
    candidates: Candidates | None  # None with admit_after=1
    longest_probe: int
    bytes: int
    room: float
    full_bucket: int | None = None  # the bucket that has stopped training, if no batch was trained since

    @classmethod
    def of(cls, index: HashIndex) -> IndexFacts | None:
        """The facts of one index; None if it is on the meta device and holds nothing."""
        if index.bucket_taken.is_meta:
            return None
        config, policy, buffers = index.config, index.policy, index.index_buffers()
        own = policy.own_buckets
        borders = torch.arange(own.start, own.start + len(own) + 1, device=buffers.bucket_taken.device)
        begins = bucket_begins(borders, config.rows, config.dense_rows, config.buckets) - policy.row_begin
        counters, trained = index.counters, dict(zip(COUNTERS, buffers.counts.tolist(), strict=True))
        candidates = _candidates(buffers, begins, own.start) if config.admits else None
        full = index.full_at
        is_full = full is not None and full[:2] == (index.adopted.times, trained["batches"])
        return cls(
            config=config,
            rows=policy.own_rows,
            index_rows=policy.own_index_rows,
            buckets=len(own),
            occupancy=index.occupancy(),
            counters=counters,
            trained=trained,
            evaluated=dict(zip(EVAL_COUNTERS, index.fold_eval_counts().tolist(), strict=True)),
            candidates=candidates,
            longest_probe=index.longest_probe(),
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in buffers),
            room=expected_room(begins.diff() - int(policy.unseen == 2) - buffers.bucket_taken) if own else 0.0,
            full_bucket=full[2] if full is not None and is_full else None,
        )


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


@dataclass(frozen=True)
class Kernel:
    """The backend that serves a lookup now."""

    name: str  # "" if there is none
    passed_over: tuple[Diagnostic, ...]  # the backends before it, and why they were not taken
    refused: Diagnostic | None = None  # why there is none


@dataclass(frozen=True)
class TableFacts:
    """One table of a converted collection."""

    module_path: str  # of the module that holds the weight
    spec: TableSpec
    config: BaseEmbeddingConfig
    weight: nn.Parameter
    index: HashIndex | None  # None if ids are rows
    index_facts: IndexFacts | None  # None without an index, on meta, and if not asked for
    kernel: Kernel
    optimizer: FusedOptimizer | Diagnostic | None  # why it is not fused, if it runs in backward
    existed: bool  # before recfx, so that it was converted rather than built directly


def table_facts(
    collection: ConvertedCollection, path: str, existed: bool, with_indexes: bool = True
) -> dict[str, TableFacts]:
    """The tables of a collection at ``path`` of which this rank has a part, by name; changes nothing.

    ``with_indexes``: whether to look at what the indexes hold and have counted, which takes most of the time.
    """
    parts = parts_here(collection)
    kernels, indexes = _kernels_by_table(collection.graph_module), dict(collection.hash_indexes.items())
    facts, kind = {}, kind_of(collection)
    for spec, config in zip(collection.tables, kind.configs_of(collection), strict=True):
        if spec.name not in parts:
            continue
        name = parts[spec.name]
        index = indexes.get(name)
        assert index is None or isinstance(index, HashIndex)
        facts[spec.name] = TableFacts(
            module_path=kind.table_path(path, name),
            spec=spec,
            config=config,
            weight=collection.weight(name),
            index=index,
            index_facts=IndexFacts.of(index) if with_indexes and index is not None else None,
            kernel=kernels[name],
            optimizer=_optimizer(collection, name, kind.table_path(path, name)),
            existed=existed,
        )
    return facts


def parts_here(collection: ConvertedCollection) -> dict[str, str]:
    """The collection's name for this rank's part of each table of which it has one, by name of the table."""
    if not isinstance(collection, ShardedCollection):
        return {table.name: table.name for table in collection.tables}
    local = {table.name: collection.sharding.local_of(table.name) for table in collection.tables}
    return {name: shards[0].name for name, shards in local.items() if shards}  # all shards here have the same rows


def _kernels_by_table(graph_module: nn.Module) -> dict[str, Kernel]:
    """The kernel that each table's lookup uses now: tables may have moved since the graph was lowered."""
    kernels: dict[str, Kernel] = {}
    for module in graph_module.modules():
        if not isinstance(module, Lookup):
            continue
        try:
            choice = module.select(module.backend)
            kernel = Kernel(choice.backend, choice.declined)
        except ConversionError as error:
            kernel = Kernel("", (), error.diagnostic)
        kernels |= {table.name: kernel for table in module.tables}
    return kernels


def _optimizer(collection: ConvertedCollection, table: str, path: str) -> FusedOptimizer | Diagnostic | None:
    fused = collection.store.optimizers.get(table)
    weight = collection.weight(table)
    if fused is not None or collection.is_sharded or not attached_optimizers(weight):
        return fused
    # It was attached after the conversion; the next forward takes it over.
    return collection.not_fused.get(table) or fused_optimizer_of(weight, path)
