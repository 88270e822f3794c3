"""The collections of a model as a plan shards them, or as they are sharded already, and the graphs of their ranks.

All of it is data: for any rank, device and chip, wherever this runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from recfx.collections.collection import UnshardedCollection
from recfx.collections.compile_graph import FIND_ON_DEVICE, rewritten
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.optimizer_settings import optimizer_settings
from recfx.collections.sharding.plan import read_plan
from recfx.ir.context import CollectionContext
from recfx.ir.facts import TableFacts
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.shards import CollectionSharding
from recfx.ir.snapshot import Rewriting
from recfx.ir.tables import TableSpec
from recfx.lowering.targets import PlannedTargets
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.passes import Pass


@dataclass(frozen=True)
class PlannedCollection:
    """One sharded collection: its context as one of its ranks sees it, how often a step calls it, and how its graph is
    made.
    """

    context: CollectionContext
    calls: int = 1
    backend: str = "auto"
    passes: tuple[Pass, ...] | None = None

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


class PlannedFacts(NamedTuple):
    """What a plan does not say about a table: what kernels are chosen by, and which tables may share its lookup."""

    facts: TableFacts
    group: Hashable


def planned_graph(planned: PlannedCollection, rank: int, chip: str | None = None) -> Rewriting:
    """What the passes make of a collection on one rank; ``chip`` is the NPU whose limits its kernels have to fit."""
    context = replace(planned.context, sharding=replace(planned.sharding, rank=rank))
    return rewritten(OperatorGraph.of(context, PlannedTargets(planned.backend, chip)), planned.passes)


def graph_on(collection: UnshardedCollection, device: str, chip: str | None = None) -> Rewriting:
    """What the passes make of a collection on one rank, in the mode that it is in, with its tables on a device of this
    type, wherever they are now.
    """
    (context,) = collection.unexpanded_graph().context.collections.values()
    context = replace(context, facts={name: replace(facts, device=device) for name, facts in context.facts.items()})
    graph = rewritten(OperatorGraph.of(context, PlannedTargets(collection.backend, chip)), collection.passes)
    finds = rewritten(graph, (FIND_ON_DEVICE,))
    inserts = any(node.kwargs.get("inserts") for node in finds.graph.of_kind("find_rows"))
    return finds if inserts or not collection.training else graph


def planned_as_sharded(collection: ConvertedCollection, device: str) -> PlannedCollection:
    """A collection that is sharded, with its tables on a device of this type; nothing is communicated."""
    assert isinstance(collection, ShardedCollection)
    facts = {}
    for table in collection.tables:
        local = collection.sharding.local_of(table.name)
        trained = not local or collection.weight(local[0].name).requires_grad
        dtype, fused = collection.dtypes[table.name], collection.fused.get(table.name)
        facts[table.name] = _facts(table, dtype, device, fused, trained)
    return planned_with(collection, collection.collection, collection.sharding, facts)


def planned_by(
    collection: UnshardedCollection, plan: Mapping[str, Any], world_size: int, device: str, path: str = ""
) -> PlannedCollection:
    """A collection as a plan would shard it, on devices of this type; nothing is sharded. Raises what ``read_plan``
    raises.
    """
    sharding = read_plan(collection.tables, plan, 0, world_size, path)
    return planned_with(collection, path, sharding, planned_facts(collection, sharding, device))


def planned_with(
    collection: ConvertedCollection, path: str, sharding: CollectionSharding, facts: Mapping[str, PlannedFacts]
) -> PlannedCollection:
    """A collection with its shards and the facts of its tables; ``path`` is its fully qualified name."""
    groups: dict[Hashable, int] = {}
    device = next((table.facts.device for table in facts.values()), "")
    context = CollectionContext(
        name=path,
        tables=tuple(sharded.table for sharded in sharding.tables),
        facts={name: table.facts for name, table in facts.items()},
        kernel_groups={name: groups.setdefault(table.group, len(groups)) for name, table in facts.items()},
        is_weighted=collection.is_weighted(),
        sharding=sharding,
        # nccl exchanges ids between GPUs; the group for the ids of NPUs is one of gloo, as that of hosts is.
        ids_on_host=device != "cuda",
        source=collection.source,
    )
    return PlannedCollection(context, max(collection.calls, 1), collection.backend, collection.passes)


def planned_facts(
    collection: UnshardedCollection, sharding: CollectionSharding, device: str
) -> dict[str, PlannedFacts]:
    """The facts of the tables that a plan shards, which may be some of a collection, on a device of this type."""
    fused = optimizer_settings(collection, sharding, None, dense_as_torchrec=False).fused
    facts = {}
    for table in (sharded.table for sharded in sharding.tables):
        weight = collection.weight(table.name)
        facts[table.name] = _facts(table, weight.dtype, device, fused.get(table.name), weight.requires_grad)
    return facts


def _facts(
    table: TableSpec, dtype: torch.dtype, device: str, fused: FusedOptimizer | None, is_trained: bool
) -> PlannedFacts:
    rows, dim, optimizer = table.num_embeddings, table.embedding_dim, None if fused is None else fused.facts
    facts = TableFacts(rows, dim, dtype, device, optimizer=optimizer, is_trained=is_trained)
    return PlannedFacts(facts, (dtype, None if fused is None else fused.settings()))
