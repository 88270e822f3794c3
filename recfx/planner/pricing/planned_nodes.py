"""The nodes that a rank's graph will have under a plan, with what the formulas know of them; nothing is made.

They are those of the passes: tests compare them with the graphs of planned and of real ranks, node by node. Making the
graph of every kind of rank of every plan that a planner looks at would take minutes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

import sympy

from recfx.ir.facts import LookupFacts
from recfx.ir.meta import BATCH, WORLD, Collective, mean_length
from recfx.ir.names import node_name
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.ir.node_values import of_sent, of_splits
from recfx.ir.shard import Shard
from recfx.ir.shards import ShardedTable
from recfx.ir.tables import embedding_names, output_dtype
from recfx.ir.ways_back import HopSize, SentRows, WayBack, Wires, World
from recfx.lowering.registry import select_planned
from recfx.planner.pricing.graph_prices import GraphPrices
from recfx.planner.pricing.node_facts import NodeFacts, PlannedNode, Symbols, TableLoad
from recfx.planner.pricing.planned_collection import PlannedCollection, PlannedFacts, planned_graph
from recfx.planner.pricing.residents import planned_resident, rule_of
from recfx.planner.pricing.work import NO_RESIDENT, Resident, total
from recfx.runtime.keyed_tensor import keyed_order


class ShardOnRank(NamedTuple):
    """A shard, with its table and what a batch does to it."""

    table: PlannedTable
    shard: Shard
    load: TableLoad


class PlannedTable:
    """What formulas need of one sharded table on all ranks, each found out once."""

    def __init__(self, sharded: ShardedTable, known: PlannedFacts, world_size: int, symbols: Symbols) -> None:
        self.sharded, self.known, self.facts, self.group = sharded, known, known.facts, known.group
        self.table, self.way, self.shards = sharded.table, sharded.way_back, sharded.filled
        ranks_per_sender = self.way.ranks_per_sender(world_size)
        self.rows = SentRows.of(self.shards, ranks_per_sender, world_size, symbols.sent)
        firsts: dict[Hashable, Shard] = {}
        for shard in self.shards:
            firsts.setdefault((shard.rank // ranks_per_sender, shard.columns), shard)
        self.different_columns = list(firsts.values())
        """The first shard of each sender that has these columns."""
        self.is_cut = any(shard.piece >= 0 for shard in self.shards)
        blocks = {shard.columns for shard in self.shards}
        self.times_sent = len(blocks) if self.is_cut else len(self.shards)
        """How often its ids are sent: to every replica, and for every block of columns."""
        self._symbols, self._rule = symbols, rule_of(known.facts)
        self._loads: dict[tuple[int, int], TableLoad] = {}
        self._residents: dict[tuple[tuple[int, int], int], Resident] = {}
        self.on_rank: dict[int, list[ShardOnRank]] = {}
        for shard in self.shards:
            self.on_rank.setdefault(shard.rank, []).append(ShardOnRank(self, shard, self.load(shard)))

    def load(self, shard: Shard) -> TableLoad:
        """The load of one shard; shards of equal size have the same."""
        size = (shard.num_rows, shard.num_columns)
        load = self._loads.get(size)
        if load is None:
            row_bytes, rows = shard.num_columns * self.facts.dtype.itemsize, self.table.num_embeddings
            load = TableLoad.of(shard.spec, rows, row_bytes, self._rule, self.facts.is_trained, self._symbols)
            self._loads[size] = load
        return load

    @cached_property
    def whole_load(self) -> TableLoad:
        """The ids that a rank has for it before any are sent."""
        rows, row_bytes = self.table.num_embeddings, self.table.embedding_dim * self.facts.dtype.itemsize
        return TableLoad.of(self.table, rows, row_bytes, self._rule, self.facts.is_trained, self._symbols)

    def resident(self, shard: Shard) -> Resident:
        key = (shard.rows, shard.num_columns)
        resident = self._residents.get(key)
        if resident is None:
            resident = self._residents[key] = planned_resident(shard.spec, self.facts.dtype, self._rule)
        return resident


class PlannedGraphs:
    """The graphs of one sharded collection on all ranks; ``tables`` are given if their loads are known already."""

    def __init__(
        self,
        planned: PlannedCollection,
        symbols: Symbols,
        trains: bool,
        tables: Sequence[PlannedTable] | None = None,
    ) -> None:
        self.planned, self.context, self.symbols, self.trains = planned, planned.context, symbols, trains
        sharding, facts, groups = planned.sharding, self.context.facts, self.context.kernel_groups
        self.world_size = sharding.world_size
        if tables is None:
            known = {name: PlannedFacts(facts[name], groups[name]) for name in facts}
            tables = [
                PlannedTable(sharded, known[sharded.table.name], self.world_size, symbols)
                for sharded in sharding.tables
            ]
        self.tables = tables
        self.ways = [
            _Way(way, [table for table in tables if table.way == way], sharding.wires) for way in sharding.ways_back
        ]
        self.on_rank: dict[int, list[ShardOnRank]] = {}
        """The shards of every rank, in the order in which it receives their features."""
        for way in self.ways:
            for rank, shards in way.on_rank.items():
                self.on_rank.setdefault(rank, []).extend(shards)

        features = [(table, name) for table in tables for name in table.table.feature_names]
        self.bags, self.sent_bags = len(features), sum(len(table.shards) for table, _ in features)
        """How many bags a rank has per sample, and how many it sends."""
        self.ids = symbols.batch * total(symbols.length(name) for _, name in features)
        sent = [(table, name) for table in tables for name in table.table.sent_lengths]
        self.different_ids = symbols.batch * total(symbols.length(name) for _, name in sent)
        self.sent_ids = symbols.batch * total(table.times_sent * symbols.length(name) for table, name in sent)
        self.is_deduped = any(table.table.sends_different for table in tables)
        self.is_hashed = any(table.table.has_index for table in tables)
        self.element_bytes = output_dtype(planned.tables).itemsize
        self.is_cut = any(table.is_cut for table in tables)
        """Whether ids are routed by row."""
        self._can_find: dict[Hashable, bool] = {}

    @property
    def is_numbers(self) -> bool:
        """Whether its nodes hold numbers alone: those of graphs, and lengths that differ between ranks, are symbols."""
        return self.planned.passes is None and self.symbols.sent is not mean_length

    @cached_property
    def arrives_in_order(self) -> bool:
        """Whether no bag has to be moved before ids are sent: every table is sent once, in the order of ranks."""
        if any(len(table.shards) != 1 for table in self.tables):
            return False
        in_turn = [(table.shards[0].rank, table.table.name) for way in self.ways for table in way.tables]
        names = [name for _, name in sorted(in_turn, key=lambda place: place[0])]
        return names == [table.table.name for table in self.tables]

    @cached_property
    def ranges(self) -> int:
        """The ranges of columns that are put into order at the end; the same on all ranks."""
        world, keys = World(0, self.world_size), embedding_names(self.planned.tables)
        return keyed_order(keys, [way.way.arriving(way.different_columns, world) for way in self.ways]).ranges

    @cached_property
    def collectives(self) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        """The collectives that start sending ids, and those that send them."""
        sent = of_sent(self.sent_bags, self.sent_ids, self.world_size, self.context.is_weighted)
        return of_splits(self.world_size), sent

    def kind_of_rank(self, rank: int) -> Hashable:
        """Ranks of one kind have graphs that cost the same."""
        loads = [id(shard.load) for shard in self.on_rank.get(rank, ())]
        world = World(rank, self.world_size)
        return tuple(loads), tuple(tuple(hop.dim for hop in way.hops(world)) for way in self.ways)

    def can_find(self, table: PlannedTable, shard: Shard) -> bool:
        """Whether the kernel of a lookup of this and of like tables on a CPU finds rows itself."""
        if table.group not in self._can_find:
            facts = replace(table.facts, rows=shard.num_rows, embedding_dim=shard.num_columns)
            combine = "SUM" if self.context.is_pooled else NOT_COMBINED
            lookup = LookupFacts((shard.spec,), combine, self.context.is_weighted, (facts,))
            self._can_find[table.group] = select_planned(lookup, self.planned.backend).finding_declined is None
        return self._can_find[table.group]

    def nodes(self, rank: int) -> list[PlannedNode]:
        """The nodes of one rank, in order; those of its graph if the user named the passes, because nobody else knows
        what they make.
        """
        if self.planned.passes is not None:
            graph = planned_graph(self.planned, rank).graph
            prices = GraphPrices(graph, self.trains)
            return [prices.node(node) for node in graph.operators]
        return _NodesOfRank(self, rank).nodes()

    def resident(self, rank: int) -> Resident:
        return sum((table.resident(shard) for table, shard, _ in self.on_rank.get(rank, ())), start=NO_RESIDENT)


class _Lookup(NamedTuple):
    """What one lookup reads: its tables, and the ids and bags that reach them."""

    tables: tuple[TableLoad, ...]
    ids: Any
    bags: Any


class _Way:
    """The tables that travel back in one way."""

    def __init__(self, way: WayBack, tables: list[PlannedTable], wires: Wires) -> None:
        self.way, self.tables, self.wires = way, tables, wires
        self.rows = SentRows.together([table.rows for table in tables])
        self.element_bytes = output_dtype(tuple(table.table for table in tables)).itemsize
        self.features = [name for table in tables for name in table.table.feature_names]
        self.sent_lengths = [name for table in tables for name in table.table.sent_lengths]
        self.bags = len(self.features)
        self.row_bytes = tables[0].table.embedding_dim * self.element_bytes
        """Bytes of a whole row, if rows are not combined: then all have as many columns."""
        self.has_means = any(table.table.pooling == "MEAN" for table in tables)
        self.on_rank: dict[int, list[ShardOnRank]] = {}
        for table in tables:
            for rank, shards in table.on_rank.items():
                self.on_rank.setdefault(rank, []).extend(shards)
        self._lookups: dict[tuple[TableLoad, ...], list[_Lookup]] = {}

    @property
    def different_columns(self) -> list[Shard]:
        return [shard for table in self.tables for shard in table.different_columns]

    def lookups(self, rank: int) -> list[_Lookup]:
        """One for each group of tables; ranks that have the same, as of tables on all ranks, share them."""
        here = self.on_rank.get(rank, ())
        key = tuple(shard.load for shard in here)
        if key not in self._lookups:
            groups: dict[Hashable, list[TableLoad]] = {}
            for table, shard, load in here:
                width = None if table.table.is_pooled else shard.num_columns
                groups.setdefault((table.group, width), []).append(load)
            self._lookups[key] = [
                _Lookup(tuple(loads), total(load.ids for load in loads), total(load.bags for load in loads))
                for loads in groups.values()
            ]
        return self._lookups[key]

    def hops(self, world: World) -> tuple[HopSize, ...]:
        return self.way.hop_sizes_on(self.wires, self.rows, world)


class _NodesOfRank:
    """Lists the nodes of one rank."""

    def __init__(self, graphs: PlannedGraphs, rank: int) -> None:
        self.graphs, self.rank, self.batch = graphs, rank, graphs.symbols.batch
        self.listed: list[PlannedNode] = []
        self.numbers: dict[str, int] = {}
        self.local = graphs.on_rank.get(rank, [])
        self.loads = tuple(shard.load for shard in self.local)
        self.arrived = {"ids": total(load.ids for load in self.loads), "bags": total(load.bags for load in self.loads)}
        self.is_hashed = graphs.is_hashed and any(shard.table.table.has_index for shard in self.local)
        self.crosses = graphs.context.copies_ids and self.is_hashed
        self.ids_on_host = self.crosses and graphs.context.ids_on_host

    def nodes(self) -> list[PlannedNode]:
        graphs = self.graphs
        self._send_ids()
        hops_of_ways = [self._look_up(way) for way in graphs.ways]
        for way, hops in zip(graphs.ways, hops_of_ways, strict=True):
            self._collect(way, hops)
        for way in graphs.ways:
            if any(table.table.sends_different for table in way.tables):
                ids = self.batch * total(map(graphs.symbols.length, way.features))
                self._add("expand_rows", ids=ids, value_bytes=ids * way.row_bytes)
        if graphs.context.is_pooled:
            value_bytes = self.batch * sum(way.rows.once.dim for way in graphs.ways) * graphs.element_bytes
            self._add("keyed_tensor", value_bytes=value_bytes, ranges=graphs.ranges, rows=self.batch)
        else:
            self._add("jagged_dict", ids=graphs.ids)
        return self._with_fused_lookup()

    def _send_ids(self) -> None:
        graphs, on_host = self.graphs, self.ids_on_host
        own = {"ids": graphs.ids, "bags": self.batch * graphs.bags}
        sent = {"ids": graphs.sent_ids, "bags": own["bags"], "sent_bags": self.batch * graphs.sent_bags}
        splits, tensors = graphs.collectives
        self._add("select_features", **own)
        if on_host:
            self._add("to_host", **own)
        if graphs.is_deduped:
            loads = tuple(table.whole_load for table in graphs.tables)
            self._add("dedup_ids", on_host=on_host, tables=loads, ids=graphs.different_ids, bags=own["bags"])
        if graphs.is_cut:
            self._add("bucketize", on_host=on_host, **sent)
        moves = not graphs.is_cut and not graphs.arrives_in_order
        self._add("input_dist_start", splits, on_host=on_host, moves=moves, **sent)
        self._add("input_dist_wait", tensors, on_host=on_host, **self.arrived)

    def _hash(self) -> None:
        if self.crosses and not self.ids_on_host:
            self._add("to_host", **self.arrived)
        self._add("hash_ids", on_host=self.crosses, tables=self.loads, **self.arrived)
        if self.crosses:
            self._add("to_device", **self.arrived)

    def _look_up(self, way: _Way) -> tuple[HopSize, ...]:
        lookups = way.lookups(self.rank)
        if lookups and self.is_hashed and "hash_ids" not in self.numbers:
            self._hash()  # before the first lookup
        for lookup in lookups:
            self._add("lookup", **lookup._asdict())
        hops = way.hops(World(self.rank, self.graphs.world_size))
        if self.graphs.context.is_pooled:
            self._send(way, hops[0], len(lookups))
        else:
            loads = chain.from_iterable(lookup.tables for lookup in lookups)
            numbers = total(load.ids * load.spec.embedding_dim for load in loads)
            self._add("output_dist_start", hops[0].collectives, value_bytes=numbers * way.element_bytes)
        return hops

    def _collect(self, way: _Way, hops: tuple[HopSize, ...]) -> None:
        if not self.graphs.context.is_pooled:
            length = self.graphs.symbols.length
            different = self.batch * total(map(length, way.sent_lengths))
            self._add("output_dist_wait", ids=different, value_bytes=different * way.row_bytes)
            return
        for hop in hops[1:]:
            self._add("output_dist_wait", value_bytes=self._bytes(way, hop))
            self._send(way, hop, 1)
        arrived = self.batch * way.rows.once.dim * way.element_bytes
        self._add("output_dist_wait", value_bytes=arrived)
        if way.has_means:
            self._add("mean_divide", value_bytes=arrived, bags=self.batch * way.bags)

    def _send(self, way: _Way, hop: HopSize, parts: int) -> None:
        self._add("output_dist_start", hop.collectives, value_bytes=self._bytes(way, hop), parts=parts)

    def _bytes(self, way: _Way, hop: HopSize) -> int:
        """The bytes of the rows that a hop sends. Expressions have all ranks' samples as ``W * B``."""
        return _samples(hop.samples, self.graphs.symbols.everybody, self.batch) * hop.dim * way.element_bytes

    def _add(self, kind: str, collectives: tuple[Collective, ...] = (), *, on_host: bool = False, **facts: Any) -> None:
        number = self.numbers[kind] = self.numbers.get(kind, -1) + 1
        context, trains = self.graphs.context, self.graphs.trains
        name = node_name(context.name, kind if number == 0 else f"{kind}_{number}")
        node_facts = NodeFacts(
            kind, is_weighted=context.is_weighted, is_pooled=context.is_pooled, trains=trains, **facts
        )
        calls = tuple(call for call in collectives if trains or not call.backward)
        self.listed.append(PlannedNode(name, node_facts, calls, on_host))

    def _with_fused_lookup(self) -> list[PlannedNode]:
        """On a CPU, one kernel finds the rows and pools them, if a single lookup reads them and has such a kernel."""
        graphs = self.graphs
        if not self.is_hashed or graphs.context.device != "cpu" or self.numbers.get("lookup") != 0:
            return self.listed
        if not graphs.can_find(*self.local[0][:2]):  # all of one lookup are alike
            return self.listed
        name = node_name(graphs.context.name, "hash_lookup")
        return [
            replace(node, name=name, facts=replace(node.facts, kind="hash_lookup"))
            if node.facts.kind == "lookup"
            else node
            for node in self.listed
            if node.facts.kind != "hash_ids"
        ]


@lru_cache(maxsize=1024)
def _samples(samples: sympy.Expr, everybody: Any, batch: Any) -> int:
    on_all = samples.xreplace({WORLD: sympy.Integer(everybody) / BATCH})
    return int(on_all.xreplace({BATCH: sympy.Integer(batch)}))
