"""The collections of a model as a plan shards them, or as they are sharded already, and the graphs of their ranks.

An instance of :class:`PlannedTable` has what formulas need of one table on all ranks, each found out once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from recfx.collections.collection import UnshardedCollection
from recfx.collections.compile_graph import rewritten
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.optimizer_settings import optimizer_settings
from recfx.collections.sharding.plan import read_plan
from recfx.ir.context import CollectionContext
from recfx.ir.facts import TableFacts
from recfx.ir.meta import SourceLocation
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.shard import Shard
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.ir.snapshot import Rewriting
from recfx.ir.tables import TableSpec
from recfx.ir.ways_back import SentRows
from recfx.lowering.targets import PlannedTargets
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.passes import Pass
from recfx.planner.pricing.node_facts import Symbols, TableLoad
from recfx.planner.pricing.residents import planned_resident
from recfx.planner.pricing.work import Resident


@dataclass(frozen=True)
class TableTraits:
    """What a plan does not say about a table.

    Args:
        dtype: of its rows.
        fused: its fused optimizer, if it has one.
        is_trained: whether the backward reaches it.
    """

    dtype: torch.dtype
    fused: FusedOptimizer | None = None
    is_trained: bool = True

    @cached_property
    def group(self) -> Hashable:
        """Tables of one group share a lookup."""
        return self.dtype, None if self.fused is None else self.fused.settings()


class PlannedTable:
    """One table, sharded.

    Args:
        sharded: its shards.
        traits: what else is known of it.
        world_size: the number of ranks.
        symbols: of the batch.
    """

    def __init__(self, sharded: ShardedTable, traits: TableTraits, world_size: int, symbols: Symbols) -> None:
        self.table, self.way, self.traits = sharded.table, sharded.way_back, traits
        self.shards = sharded.filled
        self.rows = SentRows.of(self.shards, self.way.ranks_per_sender(world_size), world_size)
        self.is_cut = any(shard.piece >= 0 for shard in self.shards)
        blocks = {shard.columns for shard in self.shards}
        self.times_sent = len(blocks) if self.is_cut else len(self.shards)
        """How often its ids are sent: to every replica, and for every block of columns."""
        self._symbols, self._rule = symbols, None if traits.fused is None else traits.fused.rule
        self._loads: dict[tuple[int, int], TableLoad] = {}
        self._residents: dict[tuple[tuple[int, int], int], Resident] = {}
        self.on_rank: dict[int, list[Shard]] = {}
        for shard in self.shards:
            self.on_rank.setdefault(shard.rank, []).append(shard)

    def load(self, shard: Shard) -> TableLoad:
        """The load of one shard; shards of equal size have the same."""
        size = (shard.num_rows, shard.num_columns)
        found = self._loads.get(size)
        if found is None:
            row_bytes, rows = shard.num_columns * self.traits.dtype.itemsize, self.table.num_embeddings
            found = TableLoad.of(shard.spec, rows, row_bytes, self._rule, self.traits.is_trained, self._symbols)
            self._loads[size] = found
        return found

    def resident(self, shard: Shard) -> Resident:
        """What one shard keeps."""
        key = (shard.rows, shard.num_columns)
        found = self._residents.get(key)
        if found is None:
            found = self._residents[key] = planned_resident(shard.spec, self.traits.dtype, self._rule)
        return found


@dataclass(frozen=True)
class PlannedCollection:
    """One collection, sharded.

    Args:
        name: its fully qualified name.
        sharding: its tables on all ranks.
        traits: by table name.
        is_weighted: whether ids carry weights.
        calls: how often a step calls it.
        backend: kernel target of its lookups, as for ``convert``.
        source: where the user's code creates it, if known.
        passes: the passes that make its graph, if the user named them; None: those of ``recfx.passes()``.
    """

    name: str
    sharding: CollectionSharding
    traits: Mapping[str, TableTraits]
    is_weighted: bool
    calls: int = 1
    backend: str = "auto"
    source: SourceLocation | None = None
    passes: tuple[Pass, ...] | None = None

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """The whole tables."""
        return tuple(each.table for each in self.sharding.tables)

    def seen_from(self, rank: int) -> PlannedCollection:
        """This collection as another rank sees it."""
        return replace(self, sharding=replace(self.sharding, rank=rank))


def exchanges_ids_on_host(device: str) -> bool:
    """Whether the ranks of a plan exchange ids on the host.

    nccl exchanges them between GPUs. The group for the ids of NPUs is one of gloo, as that of hosts is.

    Args:
        device: the type of the device that has the tables.
    """
    return device != "cuda"


def planned_graph(planned: PlannedCollection, rank: int, device: str, chip: str | None = None) -> Rewriting:
    """What the passes make of a collection on one rank.

    Args:
        planned: the collection.
        rank: the rank.
        device: the type of the device that would have the tables.
        chip: the name of the NPU whose limits its kernels would have to fit; None if none do.

    Raises:
        ConversionError: ``malformed_graph``: passes of the user's left one.
    """
    graph = OperatorGraph.of(planned_context(planned, rank, device), PlannedTargets(planned.backend, chip))
    return rewritten(graph, planned.passes)


def planned_context(planned: PlannedCollection, rank: int, device: str) -> CollectionContext:
    """What the graph of one rank would be about; the arguments are those of :func:`planned_graph`."""
    facts, groups, settings = {}, {}, dict[Hashable, int]()
    for table in planned.tables:
        traits = planned.traits[table.name]
        facts[table.name] = TableFacts(
            table.num_embeddings,
            table.embedding_dim,
            traits.dtype,
            device,
            optimizer=None if traits.fused is None else traits.fused.facts,
            is_trained=traits.is_trained,
        )
        groups[table.name] = settings.setdefault(traits.group, len(settings))
    return CollectionContext(
        name=planned.name,
        tables=planned.tables,
        facts=facts,
        kernel_groups=groups,
        is_weighted=planned.is_weighted,
        sharding=planned.seen_from(rank).sharding,
        ids_on_host=exchanges_ids_on_host(device),
        source=planned.source,
    )


def planned_as_sharded(collection: ConvertedCollection) -> PlannedCollection:
    """A collection that is sharded; nothing is communicated."""
    assert isinstance(collection, ShardedCollection)
    traits = {}
    for table in collection.tables:
        local = collection.local_shards(table.name)
        trained = not local or collection.weight(local[0].name).requires_grad
        traits[table.name] = TableTraits(collection.dtypes[table.name], collection.fused.get(table.name), trained)
    return planned_of(collection, collection.collection, collection.sharding, traits)


def planned_by(
    collection: UnshardedCollection, plan: Mapping[str, Any], world_size: int, path: str = ""
) -> PlannedCollection:
    """A collection as a plan would shard it; nothing is sharded.

    Args:
        collection: a converted collection, which may be on meta.
        plan: the sharding of each table.
        world_size: the number of ranks.
        path: fully qualified name of the collection.

    Raises:
        ConversionError: the same as ``read_plan``.
    """
    sharding = read_plan(collection.tables, plan, 0, world_size, path)
    return planned_of(collection, path, sharding, traits_of(collection, sharding))


def planned_of(
    collection: ConvertedCollection, path: str, sharding: CollectionSharding, traits: Mapping[str, TableTraits]
) -> PlannedCollection:
    """A collection with its shards and traits; ``path`` is its fully qualified name."""
    return PlannedCollection(
        path,
        sharding,
        traits,
        collection.is_weighted(),
        max(collection.calls, 1),
        collection.backend,
        collection.source,
        collection.passes,
    )


def traits_of(collection: UnshardedCollection, sharding: CollectionSharding) -> dict[str, TableTraits]:
    """What the plan of some tables of a collection does not say, by table name."""
    fused = optimizer_settings(collection, sharding, None, dense_as_torchrec=False).fused
    found = {}
    for each in sharding.tables:
        weight = collection.weight(each.table.name)
        found[each.table.name] = TableTraits(weight.dtype, fused.get(each.table.name), weight.requires_grad)
    return found
