"""insert_dist: adds the communication that the sharding plan requires, as explicit nodes.

Between ``select_features`` and the lookups, ids are sent to the ranks whose shards they read (``bucketize`` if rows are
cut, ``input_dist_start``, ``input_dist_wait``). The lookups become those of this rank's shards. After them, pooled rows
are sent back to the ranks of the samples (``output_dist_start``, ``output_dist_wait``), once per way back. Lookups pool
sums; ``mean_divide`` comes last and uses the lengths of this rank's own batch. What an ``output_dist`` must know about
the ``input_dist`` travels on an edge, as the dist context.

All ranks run the same collectives in the same order, even those that have no shard of some tables.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import sympy
from torch import fx

from recfx.ir import GraphVerificationError
from recfx.ir import exchange as wire
from recfx.ir.columns import Columns, total_dim
from recfx.ir.key_order import KeyOrder
from recfx.ir.meta import BATCH, WORLD, Collective
from recfx.ir.names import node_name
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import TableSpec, embedding_dims, embedding_names
from recfx.ir.typed_access import meta_of, node_module
from recfx.ir.way_back import Hop, WayBack
from recfx.kernels.bucketize import Routes
from recfx.nodes import (
    AssembleKeyedTensor,
    Bucketize,
    InputDistStart,
    InputDistWait,
    Lookup,
    MeanDivide,
    OutputDistWait,
    SelectFeatures,
    TableStore,
)
from recfx.nodes.base import NodeModule
from recfx.nodes.dist_groups import DistGroups, sent_on
from recfx.nodes.output_dist import STARTS
from recfx.passes._nodes import add_node, nodes_of_kind, remove_node, renumber, resources_of
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class InsertDist:
    """Insert communication.

    Args:
        sharding: how the collection is sharded; None if it is not, in which case the pass does nothing.
    """

    sharding: CollectionSharding | None = None
    name: str = "insert_dist"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        if self.sharding is None:
            return PassResult(graph_module, modified=False)
        for output in nodes_of_kind(graph_module, "keyed_tensor"):
            _Rewrite(graph_module, output, self.sharding, self.name).run()
        return PassResult(graph_module, modified=True)


class _Way:
    """One way back: its tables and shards, and what this rank sends and receives."""

    def __init__(self, way: WayBack, sharding: CollectionSharding) -> None:
        self.tables, self.shards = sharding.tables_of(way), sharding.travelling(way)
        self.hops = way.hops(self.shards, sharding.world)
        self.arriving = way.arriving(self.shards, sharding.world)


class _Rewrite:
    """Replaces the nodes that ``expand_collection`` has put after the ``select_features`` of one collection."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        output: fx.Node,
        sharding: CollectionSharding,
        name: str,
    ) -> None:
        self.graph_module, self.output = graph_module, output
        self.sharding, self.name = sharding, name
        (self.select,) = nodes_of_kind(graph_module, "select_features")
        self.meta = meta_of(self.select)
        self.selected = node_module(graph_module, self.select, SelectFeatures)
        self.store, self.groups = _resources(graph_module, self.meta.collection)
        self.keys = self.selected.keys
        self.local = tuple(shard.spec for shard in sharding.local())
        self.arriving_ids = wire.arriving_ids(sharding.local())
        self.everybody: sympy.Expr = WORLD * BATCH

    def run(self) -> None:
        self.selected.prepare_to_send(self.sharding.world_size, self.groups.ids_on_host)
        old = _between(self.graph_module, self.select, self.output)
        with self.graph_module.graph.inserting_before(self.output):
            ids, context = self.distribute_ids()
            ways = [_Way(way, self.sharding) for way in self.sharding.ways_back]
            started = [self.look_up(way, ids, context) for way in ways]
            pooled, parts = [], []
            for way, node in zip(ways, started, strict=True):
                arrived, columns = self.collect(way, node, context)
                pooled.append(arrived)
                parts.append(columns)
            tables = self.selected.tables
            assemble = AssembleKeyedTensor(self.keys, embedding_dims(tables), parts)
            keyed = self.add("keyed_tensor", assemble, tuple(pooled), tables)
        self.output.replace_all_uses_with(keyed)
        if not ids.users:  # this rank has no shard of any table
            self.graph_module.graph.erase_node(ids)
        for node in [self.output, *old]:
            remove_node(self.graph_module, node)
        renumber(self.graph_module, ("lookup", "keyed_tensor"))

    # Ids

    def distribute_ids(self) -> tuple[fx.Node, fx.Node]:
        by_rank = [self.sharding.on_rank(rank) for rank in range(self.sharding.world_size)]
        shards = [shard for each in by_rank for shard in each]
        arriving = [name for shard in shards for name in shard.spec.embedding_names]
        positions_of = KeyOrder.of(self.keys).positions
        sources = [positions_of[name] for shard in shards for name in shard.table.embedding_names]
        splits = [sum(len(shard.table.embedding_names) for shard in each) for each in by_rank]
        source: fx.Node = self.select
        positions = None if arriving == self.keys else sources  # one rank with all tables in order, so nothing moves
        if any(shard.piece >= 0 for shard in shards):
            pieces = [shard.piece for shard in shards for _ in shard.table.embedding_names]
            module = Bucketize(self.routes(sources, pieces), arriving)
            sent = (wire.sent_ids(shards),)
            source, positions = self.add("bucketize", module, (self.select,), self.selected.tables, sent), None
        world_size, is_weighted = self.sharding.world_size, self.selected.is_weighted
        start = InputDistStart(
            self.groups.ids,
            splits,
            positions,
            arriving,
            self.selected.collection,
            sent_on(self.groups.ids),
            is_weighted and world_size > 1,
        )
        started = self.add(
            "input_dist_start",
            start,
            (source,),
            self.selected.tables,
            (wire.sent_ids(shards),),
            wire.of_splits(world_size),
        )
        pair = self.item(started, 0, "ids_in_flight"), self.item(started, 1, "dist_context_in_flight")
        arrived = self.add(
            "input_dist_wait",
            InputDistWait(),
            pair,
            self.local,
            (self.arriving_ids,),
            wire.of_ids(shards, world_size, is_weighted),
        )
        return self.item(arrived, 0, "ids"), self.item(arrived, 1, "dist_context")

    def routes(self, sources: list[int], pieces: list[int]) -> Routes:
        cut = [table for table in self.sharding.tables for _ in table.table.embedding_names]
        indexed = [each.table.hashing if each.table.has_index else None for each in cut]
        return Routes(
            row_borders=[each.row_borders() for each in cut],
            rows=[each.table.num_embeddings for each in cut],
            dense_rows=[0 if config is None else config.dense_rows for config in indexed],
            buckets=[0 if config is None else config.buckets for config in indexed],
            seeds=[0 if config is None else config.seed for config in indexed],
            sources=sources,
            pieces=pieces,
        )

    # Pooled rows

    def look_up(self, way: _Way, ids: fx.Node, context: fx.Node) -> fx.Node:
        """Add the lookups of the shards with this way back, and the node that sends their rows off."""
        keys = KeyOrder.of(embedding_names(self.local))
        lookups, parts = [], []
        for shard in way.shards:
            if shard.rank != self.sharding.rank:
                continue
            module = Lookup(self.selected.collection, (shard.spec,), "SUM", keys, self.selected.is_weighted, self.store)
            size = self.everybody, sympy.Integer(total_dim(shard.output_columns))
            lookups.append(self.add("lookup", module, (ids,), (shard.spec,), size))
            parts.append(shard.output_columns)
        return self.send(way, way.hops[0], lookups, parts, context)

    def collect(self, way: _Way, started: fx.Node, context: fx.Node) -> tuple[fx.Node, list[Columns]]:
        """Add the nodes that receive the pooled rows of this rank's samples; also returns their columns."""
        for hop in way.hops[1:]:
            size = hop.samples, sympy.Integer(total_dim(list(hop.columns)))
            arrived = self.add("output_dist_wait", OutputDistWait(), (started,), way.tables, size)
            started = self.send(way, hop, [arrived], [list(hop.columns)], context)
        size = BATCH, sympy.Integer(total_dim(way.arriving))
        arrived = self.add("output_dist_wait", OutputDistWait(), (started,), way.tables, size)
        divided = tuple(table.name for table in way.tables if table.pooling == "MEAN")
        if divided:
            divide = MeanDivide(way.tables, divided, tuple(self.keys), way.arriving)
            arrived = self.add("mean_divide", divide, (arrived, self.select), way.tables, size)
        return arrived, way.arriving

    def send(self, way: _Way, hop: Hop, pooled: list[fx.Node], parts: list[list[Columns]], context: fx.Node) -> fx.Node:
        start = STARTS[hop.operation].of(hop, self.groups, parts, self.store.device)
        start.late_backwards = resources_of(self.graph_module, self.meta.collection).late_backwards
        size = hop.samples, sympy.Integer(total_dim(start.columns))
        return self.add("output_dist_start", start, (*pooled, context), way.tables, size, hop.collectives)

    # Nodes

    def add(
        self,
        kind: str,
        module: NodeModule,
        arguments: tuple[fx.Node, ...],
        tables: tuple[TableSpec, ...],
        shape: tuple[sympy.Expr, ...] | None = None,
        collectives: tuple[Collective, ...] = (),
    ) -> fx.Node:
        return add_node(self.graph_module, kind, module, arguments, self.meta, tables, self.name, shape, collectives)

    def item(self, pair: fx.Node, number: int, name: str) -> fx.Node:
        return self.graph_module.graph.create_node(
            "call_function", operator.getitem, (pair, number), {}, name=node_name(self.meta.collection, name)
        )


def _resources(graph_module: fx.GraphModule, collection: str) -> tuple[TableStore, DistGroups]:
    resources = resources_of(graph_module, collection)
    if resources.groups is None:
        raise GraphVerificationError(f"collection {collection!r} is to be sharded, but has no process groups")
    return resources.store, resources.groups


def _between(graph_module: fx.GraphModule, select: fx.Node, output: fx.Node) -> list[fx.Node]:
    """The nodes after ``select`` that ``output`` depends on, last first."""
    nodes = list(graph_module.graph.nodes)
    return nodes[nodes.index(select) + 1 : nodes.index(output)][::-1]
