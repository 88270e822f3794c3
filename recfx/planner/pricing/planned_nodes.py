"""The nodes that a rank's graph will have under a plan, with what the formulas know of them; nothing is made.

They are those of the passes: tests compare them with the graphs of planned and of real ranks, node by node. Making the
graph of every kind of rank of every plan that a planner looks at would take minutes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import sympy

from recfx.ir.facts import LookupFacts, TableFacts
from recfx.ir.meta import BATCH, WORLD, Collective, mean_length
from recfx.ir.names import node_name
from recfx.ir.node_values import of_sent, of_splits
from recfx.ir.shard import Shard
from recfx.ir.tables import TableSpec, embedding_names, output_dtype
from recfx.ir.ways_back import HopSize, SentRows, WayBack, World
from recfx.lowering.registry import select_planned
from recfx.planner.pricing.graph_prices import nodes_of
from recfx.planner.pricing.node_facts import NodeFacts, PlannedNode, Symbols, TableLoad
from recfx.planner.pricing.planned_collection import (
    PlannedCollection,
    PlannedTable,
    exchanges_ids_on_host,
    planned_graph,
)
from recfx.planner.pricing.work import NO_RESIDENT, Resident, total
from recfx.runtime.keyed_tensor import keyed_order


class PlannedGraphs:
    """The graphs of one sharded collection on all ranks.

    Args:
        planned: the collection.
        symbols: of the batch.
        trains: whether a step has a backward.
        device: the type of the device that has the tables.
        tables: the collection's tables if they are known already, in its order.
    """

    def __init__(
        self,
        planned: PlannedCollection,
        symbols: Symbols,
        trains: bool,
        device: str = "cpu",
        tables: Sequence[PlannedTable] | None = None,
    ) -> None:
        self.planned, self.symbols, self.trains, self.device = planned, symbols, trains, device
        self.world_size = planned.sharding.world_size
        self._can_find: dict[Hashable, bool] = {}
        self.tables = (
            tables
            if tables is not None
            else [
                PlannedTable(each, planned.traits[each.table.name], self.world_size, symbols)
                for each in planned.sharding.tables
            ]
        )
        self.ways = [_Way(way, [each for each in self.tables if each.way == way]) for way in planned.sharding.ways_back]

    # What all ranks have in common

    @cached_property
    def specs(self) -> tuple[TableSpec, ...]:
        """The whole tables."""
        return self.planned.tables

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(spec.name for spec in self.specs)

    @cached_property
    def keys(self) -> int:
        """The bags per sample."""
        return sum(len(spec.feature_names) for spec in self.specs)

    @cached_property
    def ids(self) -> Any:
        """The ids of a rank's batch."""
        length = self.symbols.length
        return self.symbols.batch * total(length(name) for spec in self.specs for name in spec.feature_names)

    @cached_property
    def element_bytes(self) -> int:
        """Bytes per column of the output."""
        return output_dtype(self.specs).itemsize

    @cached_property
    def is_cut(self) -> bool:
        """Whether ids are routed by row."""
        return any(each.is_cut for each in self.tables)

    @cached_property
    def on_rank(self) -> dict[int, list[tuple[PlannedTable, Shard]]]:
        """The shards of every rank, in the order in which it receives their features."""
        found: dict[int, list[tuple[PlannedTable, Shard]]] = {}
        for way in self.ways:
            for each in way.tables:
                for rank, shards in each.on_rank.items():
                    found.setdefault(rank, []).extend((each, shard) for shard in shards)
        return found

    @cached_property
    def sent_bags(self) -> int:
        """The bags that a rank sends per sample."""
        return sum(len(each.shards) * len(each.table.feature_names) for each in self.tables)

    @cached_property
    def sent_ids(self) -> sympy.Expr:
        """The ids that a rank sends, as an expression."""
        terms = [each.times_sent * mean_length(feature) for each in self.tables for feature in each.table.feature_names]
        return BATCH * sympy.Add(*terms)

    @cached_property
    def _sent_ids(self) -> Any:
        length = self.symbols.length
        sent = (each.times_sent * length(feature) for each in self.tables for feature in each.table.feature_names)
        return self.symbols.batch * total(sent)

    @cached_property
    def _arrives_in_order(self) -> bool:
        """Whether no bag has to be moved before ids are sent: every table is sent once, in the order of ranks."""
        if any(len(each.shards) != 1 for each in self.tables):
            return False
        in_turn = [(each.shards[0].rank, each.table.name) for way in self.ways for each in way.tables]
        names = [name for _, name in sorted(in_turn, key=lambda place: place[0])]
        return names == [each.table.name for each in self.tables]

    @cached_property
    def ranges(self) -> int:
        """The ranges of columns that are put into order at the end; the same on all ranks."""
        world = World(0, self.world_size)
        return keyed_order(
            embedding_names(self.specs), [way.way.arriving(way.shards, world) for way in self.ways]
        ).ranges

    @cached_property
    def _exchange(self) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
        ids = self.sent_ids if isinstance(self.symbols.batch, sympy.Basic) else self._sent_ids
        sent = of_sent(self.sent_bags, ids, self.world_size, self.planned.is_weighted)
        return of_splits(self.world_size), sent

    # One rank

    def kind_of_rank(self, rank: int) -> Hashable:
        """Ranks of one kind have graphs that cost the same."""
        loads = [id(each.load(shard)) for each, shard in self.on_rank.get(rank, ())]
        world = World(rank, self.world_size)
        return tuple(loads), tuple(tuple(hop.dim for hop in way.hops(world)) for way in self.ways)

    def can_find(self, table: PlannedTable, shard: Shard) -> bool:
        """Whether the kernel of a lookup of this and of like tables on a CPU finds rows itself."""
        group = table.traits.group
        if group not in self._can_find:
            optimizer = None if table.traits.fused is None else table.traits.fused.facts
            facts = TableFacts(shard.num_rows, shard.num_columns, table.traits.dtype, self.device, optimizer=optimizer)
            lookup = LookupFacts((shard.spec,), "SUM", self.planned.is_weighted, (facts,))
            self._can_find[group] = select_planned(lookup, self.planned.backend).finding_declined is None
        return self._can_find[group]

    def nodes(self, rank: int) -> list[PlannedNode]:
        """The nodes of one rank, in the order of its graph.

        Where the user named the passes, they are those of the graph, because nobody else knows what these passes make.
        """
        if self.planned.passes is not None:
            return nodes_of(planned_graph(self.planned, rank, self.device).graph, self.trains)
        return _Rank(self, rank).nodes()

    def resident(self, rank: int) -> Resident:
        """What one rank keeps."""
        found = Resident()
        for each, shard in self.on_rank.get(rank, ()):
            found += each.resident(shard)
        return found


class _Way:
    """The tables that travel back in one way."""

    def __init__(self, way: WayBack, tables: list[PlannedTable]) -> None:
        self.way, self.tables = way, tables
        self.rows = SentRows.together([each.rows for each in tables])
        self.specs = tuple(each.table for each in tables)
        self.names = tuple(spec.name for spec in self.specs)
        self.element_bytes = output_dtype(self.specs).itemsize
        self.keys = sum(len(spec.feature_names) for spec in self.specs)
        self.has_means = any(spec.pooling == "MEAN" for spec in self.specs)

    @cached_property
    def shards(self) -> list[Shard]:
        """The shards of all ranks."""
        return [shard for each in self.tables for shard in each.shards]

    def hops(self, world: World) -> tuple[HopSize, ...]:
        """What a rank sends."""
        return self.way.hop_sizes(self.rows, world)


class _Rank:
    """Lists the nodes of one rank."""

    def __init__(self, graphs: PlannedGraphs, rank: int) -> None:
        self.graphs, self.rank = graphs, rank
        self.found: list[PlannedNode] = []
        self.numbers: dict[str, int] = {}
        symbols = graphs.symbols
        self.batch, self.everybody = symbols.batch, symbols.everybody
        self.local = graphs.on_rank.get(rank, [])
        self.loads = tuple(each.load(shard) for each, shard in self.local)
        self.arrived_ids = total(load.ids for load in self.loads)
        self.arrived_bags = total(load.bags for load in self.loads)
        self.is_hashed = any(each.table.has_index for each, _ in self.local)
        self.crosses = graphs.device != "cpu" and self.is_hashed
        self.ids_on_host = self.crosses and exchanges_ids_on_host(graphs.device)

    def nodes(self) -> list[PlannedNode]:
        self._send_ids()
        started = [self._look_up(way) for way in self.graphs.ways]
        for way, hops in zip(self.graphs.ways, started, strict=True):
            self._collect(way, hops)
        dims = sum(way.rows.once.dim for way in self.graphs.ways)
        keyed = self.batch * dims * self.graphs.element_bytes
        self._add("keyed_tensor", self.graphs.names, value_bytes=keyed, ranges=self.graphs.ranges, rows=self.batch)
        return self._with_fused_lookup()

    def _send_ids(self) -> None:
        graphs = self.graphs
        ids, names = graphs.ids, graphs.names
        bags, sent_bags = self.batch * graphs.keys, self.batch * graphs.sent_bags
        self._add("select_features", names, ids=ids, bags=bags)
        if self.ids_on_host:
            self._add("to_host", names, ids=ids, bags=bags)
        splits, tensors = graphs._exchange
        sent, cut = graphs._sent_ids, graphs.is_cut
        if cut:
            self._add("bucketize", names, ids=sent, bags=bags, sent_bags=sent_bags, on_host=self.ids_on_host)
        moves = not cut and not graphs._arrives_in_order
        host = self.ids_on_host
        self._add(
            "input_dist_start", names, splits, ids=sent, bags=bags, sent_bags=sent_bags, moves=moves, on_host=host
        )
        local = tuple(shard.name for _, shard in self.local)
        self._add("input_dist_wait", local, tensors, ids=self.arrived_ids, bags=self.arrived_bags, on_host=host)

    def _hash(self) -> None:
        if not self.is_hashed:
            return
        size: dict[str, Any] = {"ids": self.arrived_ids, "bags": self.arrived_bags}
        names = tuple(shard.name for _, shard in self.local)
        if self.crosses and not self.ids_on_host:
            self._add("to_host", names, **size)
        index = Resident(index=sum(each.resident(shard).index for each, shard in self.local))
        self._add("hash_ids", names, loads=self.loads, resident=index, on_host=self.crosses, **size)
        if self.crosses:
            self._add("to_device", names, **size)

    def _look_up(self, way: _Way) -> tuple[HopSize, ...]:
        groups: dict[Hashable, list[tuple[PlannedTable, Shard]]] = {}
        for each, shard in self.local:
            if each.way == way.way:
                groups.setdefault(each.traits.group, []).append((each, shard))
        if groups and "hash_ids" not in self.numbers:
            self._hash()  # before the first lookup
        for group in groups.values():
            loads = tuple(each.load(shard) for each, shard in group)
            kept = [each.resident(shard) for each, shard in group]
            resident = Resident(sum(each.weights for each in kept), sum(each.optimizer for each in kept))
            names = tuple(shard.name for _, shard in group)
            ids, bags = total(load.ids for load in loads), total(load.bags for load in loads)
            self._add("lookup", names, loads=loads, resident=resident, ids=ids, bags=bags)
        hops = way.hops(World(self.rank, self.graphs.world_size))
        self._send(way, hops[0], len(groups))
        return hops

    def _collect(self, way: _Way, hops: tuple[HopSize, ...]) -> None:
        for hop in hops[1:]:
            arrived = self._samples(hop) * hop.dim * way.element_bytes
            self._add("output_dist_wait", way.names, value_bytes=arrived)
            self._send(way, hop, 1)
        arrived = self.batch * way.rows.once.dim * way.element_bytes
        self._add("output_dist_wait", way.names, value_bytes=arrived)
        if way.has_means:
            bags = self.batch * way.keys
            self._add("mean_divide", way.names, value_bytes=arrived, bags=bags)

    def _send(self, way: _Way, hop: HopSize, parts: int) -> None:
        value = self._samples(hop) * hop.dim * way.element_bytes
        self._add("output_dist_start", way.names, hop.collectives, value_bytes=value, parts=parts)

    def _samples(self, hop: HopSize) -> Any:
        """The rows of a hop in the symbols of this."""
        symbols = self.graphs.symbols
        if isinstance(symbols.batch, sympy.Basic):
            return hop.samples
        per_rank = hop.samples.xreplace({WORLD: sympy.Integer(symbols.everybody) / BATCH})
        return int(per_rank.xreplace({BATCH: sympy.Integer(symbols.batch)}))

    def _add(
        self,
        kind: str,
        tables: tuple[str, ...],
        collectives: tuple[Collective, ...] = (),
        *,
        loads: tuple[TableLoad, ...] = (),
        resident: Resident = NO_RESIDENT,
        on_host: bool = False,
        **sizes: Any,
    ) -> None:
        number = self.numbers[kind] = self.numbers.get(kind, -1) + 1
        name = node_name(self.graphs.planned.name, kind if number == 0 else f"{kind}_{number}")
        facts = NodeFacts(kind, loads, is_weighted=self.graphs.planned.is_weighted, trains=self.graphs.trains, **sizes)
        made = tuple(each for each in collectives if self.graphs.trains or not each.backward)
        self.found.append(PlannedNode(name, tables, facts, made, resident, on_host))

    def _with_fused_lookup(self) -> list[PlannedNode]:
        """On a CPU, one kernel finds the rows and pools them, if a single lookup reads them and has such a kernel."""
        lookups = [node for node in self.found if node.facts.kind == "lookup"]
        if not self.is_hashed or self.graphs.device != "cpu" or len(lookups) != 1:
            return self.found
        if not self.graphs.can_find(*self.local[0]):  # all of one lookup are alike
            return self.found
        (lookup,), (hashed,) = lookups, [node for node in self.found if node.facts.kind == "hash_ids"]
        fused = replace(
            lookup,
            name=node_name(self.graphs.planned.name, "hash_lookup"),
            facts=replace(lookup.facts, kind="hash_lookup"),
            resident=lookup.resident + hashed.resident,
        )
        return [fused if node is lookup else node for node in self.found if node is not hashed]
