"""The collections of a model as a plan shards them, or as they are sharded already, and the graphs of their ranks.

All of it is data: for any rank and device, wherever this runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from recfx.collections.collection import UnshardedCollection
from recfx.collections.compile_graph import FIND_ON_DEVICE, rewritten
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.plan import read_plan
from recfx.collections.sharding.settings import optimizer_settings
from recfx.ir.context import CollectionContext, TableFacts
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import Shard, TableSpec
from recfx.lowering.targets import PlannedTargets
from recfx.passes import Pass, passes
from recfx.passes.base import Rewriting
from recfx.planner.pricing.graph_prices import resident_of
from recfx.planner.pricing.work import NO_RESIDENT, Resident

CHIPS = {"npu": "Ascend910B3"}
"""The chips whose limits kernels have to fit, by the type of device."""


@dataclass(frozen=True)
class PlannedCollection:
    """One sharded collection."""

    context: CollectionContext  # its context as one of its ranks sees it
    calls: int = 1  # how often a step calls it
    backend: str = "auto"  # ``"auto"``, or the one backend that every lookup must use
    rewrites: tuple[Pass, ...] | None = None  # the user's passes; None: recfx's

    @property
    def name(self) -> str:
        return self.context.name

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        return self.context.tables

    @property
    def sharding(self) -> CollectionSharding:
        assert self.context.sharding is not None
        return self.context.sharding

    def rewriting(self, rank: int) -> Rewriting:
        """What the passes make of it on one rank, verified and step by step."""
        return rewritten(self._before(rank), self.rewrites)

    def graph(self, rank: int) -> OperatorGraph:
        """The graph that the passes make on one rank, without the checks of ``rewriting``."""
        graph = self._before(rank)
        for pass_ in passes() if self.rewrites is None else self.rewrites:
            graph = pass_.call(graph).graph
        graph.renumber()
        return graph

    def _before(self, rank: int) -> OperatorGraph:
        sharding = None if self.context.sharding is None else self.context.sharding.seen_from(rank)
        targets = PlannedTargets(self.backend, CHIPS.get(self.context.device))
        return OperatorGraph.of(replace(self.context, sharding=sharding), targets)

    @cached_property
    def kinds_of_ranks(self) -> list[Hashable]:
        """A key per rank, equal where graphs cost the same: sizes of shards, and what hosts first add up."""
        sharding, hosts = self.sharding, dict[int, set[Hashable]]()
        on_ranks: list[list[Hashable]] = [[] for _ in range(sharding.world_size)]
        for table in sharding.tables:
            ranks = table.way_back.ranks_per_sender(sharding.world_size)
            for shard in table.filled:
                on_ranks[shard.rank].append((table.table.name, shard.num_rows, shard.num_columns))
                if 1 < ranks < sharding.world_size:
                    hosts.setdefault(shard.rank // ranks, set()).add((table.table.name, shard.columns))
        local = sharding.local_size
        return [(*shards, frozenset(hosts.get(rank // local, ()))) for rank, shards in enumerate(on_ranks)]

    @cached_property
    def residents_of_ranks(self) -> list[Resident]:
        """What every rank keeps between steps."""
        kept = [NO_RESIDENT] * self.sharding.world_size
        for table in self.sharding.tables:
            for shard in table.filled:
                kept[shard.rank] += self.resident(shard)
        return kept

    def resident(self, shard: Shard) -> Resident:
        """What a shard keeps between steps."""
        key = (shard.table.name, shard.rows if shard.table.has_index else shard.num_rows, shard.num_columns)
        if key not in self._residents:
            self._residents[key] = resident_of(shard.spec, self.context.facts[shard.table.name])
        return self._residents[key]

    @cached_property
    def _residents(self) -> dict[Hashable, Resident]:
        return {}


def graph_on(collection: UnshardedCollection, device: str) -> Rewriting:
    """What the passes make of a collection in its mode on one rank, with its tables on a device of this type."""
    (context,) = collection.unexpanded_graph().context.collections.values()
    context = replace(context, facts={name: replace(facts, device=device) for name, facts in context.facts.items()})
    graph = PlannedCollection(context, 1, collection.backend, collection.passes).rewriting(rank=0)
    return graph if collection.training else rewritten(graph, (FIND_ON_DEVICE,))


def planned_by(
    collection: UnshardedCollection, plan: Mapping[str, Any], world_size: int, device: str, path: str = ""
) -> PlannedCollection:
    """Plan a collection as TorchRec's plan shards it. Raises what ``read_plan`` raises."""
    return planned_with(collection, path, read_plan(collection.tables, plan, 0, world_size, path), device)


def planned_with(
    collection: UnshardedCollection | ShardedCollection, path: str, sharding: CollectionSharding, device: str
) -> PlannedCollection:
    """A collection, by its fully qualified name, with its shards on devices of this type; it may be sharded so already.
    Nothing is sharded or communicated.
    """
    if isinstance(collection, ShardedCollection):
        fused = collection.fused
    else:
        fused = optimizer_settings(collection, sharding, None, dense_as_torchrec=False).fused
    (context,) = collection.unexpanded_graph().context.collections.values()
    facts, groups, kernel_groups = dict[str, TableFacts](), dict[Hashable, int](), dict[str, int]()
    tables = tuple(sharded.table for sharded in sharding.tables)
    for name in (table.name for table in tables):
        now, optimizer = context.facts[name], fused.get(name)
        dtype = collection.dtypes[name] if collection.is_sharded else now.dtype
        group = (dtype, None if optimizer is None else optimizer.settings())
        kernel_groups[name] = groups.setdefault(group, len(groups))
        of_optimizer = None if optimizer is None else optimizer.facts
        facts[name] = replace(now, dtype=dtype, device=device, is_contiguous=True, optimizer=of_optimizer)
    context = replace(
        context,
        name=path,
        tables=tables,
        facts=facts,
        kernel_groups=kernel_groups,
        sharding=sharding,
        # nccl exchanges ids between GPUs; the group for the ids of NPUs is one of gloo, as that of hosts is.
        ids_on_host=device != "cuda",
    )
    return PlannedCollection(context, max(collection.calls, 1), collection.backend, collection.passes)
