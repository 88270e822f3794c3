"""The collections of a model as a plan shards them, and the price of a step on all ranks: of a node, of every rank, and
of a step in which ranks wait for each other; and how long work and collectives take.

All of it is data: for any rank and device, wherever this runs.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from recfx.collections.collection import UnshardedCollection
from recfx.collections.compile_graph import FIND_ON_DEVICE, rewritten
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.plan import read_plan
from recfx.collections.sharding.settings import OptimizerSettings, optimizer_settings
from recfx.ir.context import CollectionContext, OptimizerFacts, TableFacts
from recfx.ir.meta import Collective
from recfx.ir.node_kinds import NODE_KINDS, Stage
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import Shard
from recfx.lowering.registry import PlannedTargets
from recfx.passes import Pass, passes
from recfx.passes.base import Rewriting
from recfx.planner.pricing.graph_prices import GraphPrices, resident_of
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.node_facts import Symbols, Values
from recfx.planner.pricing.work import NO_RESIDENT, NOTHING, NodeCost, Resident, Totals, Work


@dataclass(frozen=True)
class PlannedCollection:
    """One sharded collection."""

    context: CollectionContext  # its context as one of its ranks sees it
    calls: int  # how often a step calls it
    backend: str  # ``"auto"``, or the one backend that every lookup must use
    rewrites: tuple[Pass, ...] | None  # the user's passes; None: recfx's
    settings: OptimizerSettings  # of the tables with a fused optimizer

    @property
    def sharding(self) -> CollectionSharding:
        assert self.context.sharding is not None
        return self.context.sharding

    def rewriting(self, rank: int) -> Rewriting:
        """What the passes make of it on one rank, verified and step by step."""
        return rewritten(self._before(rank), self.rewrites)

    def graph(self, rank: int) -> OperatorGraph:
        """The graph that the passes make on one rank: recfx's own without the checks of ``rewriting``."""
        if self.rewrites is not None:
            return self.rewriting(rank).graph
        graph = self._before(rank)
        for pass_ in passes():
            graph = pass_.call(graph).graph
        graph.renumber()
        return graph

    def _before(self, rank: int) -> OperatorGraph:
        sharding = None if self.context.sharding is None else self.context.sharding.seen_from(rank)
        chip = "Ascend910B3" if self.context.device == "npu" else None  # whose limits kernels have to fit
        targets = PlannedTargets(self.backend, chip)
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
    graph = PlannedCollection(context, 1, collection.backend, collection.passes, OptimizerSettings({}, {})).rewriting(0)
    return graph if collection.training else rewritten(graph, (FIND_ON_DEVICE,))


def planned_by(
    collection: UnshardedCollection, plan: Mapping[str, Any], world_size: int, device: str, path: str = ""
) -> PlannedCollection:
    """Plan a collection as TorchRec's plan shards it. Raises what ``read_plan`` raises."""
    return planned_with(collection, path, read_plan(collection.tables, plan, 0, world_size, path), device)


def planned_with(
    collection: UnshardedCollection | ShardedCollection, path: str, sharding: CollectionSharding, device: str
) -> PlannedCollection:
    """A collection, which may be sharded so already, with its shards on devices of this type; nothing is sharded."""
    if isinstance(collection, ShardedCollection):
        settings = OptimizerSettings(collection.fused, collection.taken)
    else:
        settings = optimizer_settings(collection, sharding, None, dense_as_torchrec=False)
    (context,) = collection.unexpanded_graph().context.collections.values()
    facts, groups, kernel_groups = dict[str, TableFacts](), dict[Hashable, int](), dict[str, int]()
    tables = tuple(sharded.table for sharded in sharding.tables)
    for name in (table.name for table in tables):
        now, optimizer = context.facts[name], settings.fused.get(name)
        dtype = collection.dtypes[name] if collection.is_sharded else now.dtype
        group = (dtype, None if optimizer is None else optimizer.settings())
        kernel_groups[name] = groups.setdefault(group, len(groups))
        of_optimizer = None if optimizer is None else OptimizerFacts(*optimizer.facts)
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
    return PlannedCollection(context, max(collection.calls, 1), collection.backend, collection.passes, settings)


def price(node: NodeCost, values: Values | Symbols, hardware: Hardware) -> NodeCost:
    """A node in the numbers of one batch, or in expressions but for the number of ranks, with its time."""
    priced = node.mapped(values.number)
    waits = (seconds_of_call(call, values.world, hardware) for call in priced.collectives)
    return replace(priced, seconds=sum(seconds_of_phases(priced, hardware)) + node.calls * sum(waits))


def seconds_of_phases(node: NodeCost, hardware: Hardware) -> list[float]:
    """The seconds of the forward and of the backward per step, without collectives; amounts are numbers."""
    on_host, phases = runs_on_host(node, hardware), (node.forward, node.backward)
    return [node.calls * seconds_of_work(work, hardware, on_host) if work != NOTHING else 0.0 for work in phases]


def runs_on_host(node: NodeCost, hardware: Hardware) -> bool:
    """Whether a node runs beside the device that has the tables, as indexes do wherever the graph was made."""
    return (node.on_host or node.kind == "hash_ids") and hardware.host_memory_bandwidth != hardware.memory_bandwidth


def seconds_of_work(work: Work, hardware: Hardware, on_host: bool = False) -> float:
    """The time of one phase, whose amounts are numbers: its parts one after the other, and the overheads."""
    bandwidth = hardware.host_memory_bandwidth if on_host else hardware.memory_bandwidth
    miss = hardware.host_random_access if on_host else hardware.random_access
    return (
        hardware.node_overhead
        + (work.read_bytes + work.written_bytes) / bandwidth
        + work.random_accesses * miss
        + work.flops / hardware.flops
        + work.copied_bytes / hardware.copy_bandwidth
        + work.sorted_ids * hardware.sort_per_id
        + work.tables * hardware.table_overhead
        + work.indexes * hardware.index_overhead
        + work.copied_ranges * hardware.range_overhead
    )


def seconds_of_call(call: Collective, world: int, hardware: Hardware, times: float = 1.0) -> float:
    """How long a collective takes after all ranks have come to it, where a rank passes so many times its bytes to it.

    A rank keeps its own part. Of the rest, an all-to-all sends what other hosts need over the network. The other
    operations do so only once per host, because the ranks of a host first add up their parts, or share what arrived. An
    all-reduce is a reduce-scatter and an all-gather. A call across hosts has each of its ranks on another host.
    """
    ranks, operation = call.ranks or world, call.operation
    if ranks <= 1:
        return 0.0
    local = 1 if call.across_hosts else min(ranks, hardware.ranks_per_host)
    hosts = math.ceil(ranks / local)
    whole = ranks if operation == "all_gather" else 1
    inside, outside = whole * (local - 1) / ranks, whole * (ranks - local) / ranks
    if operation != "all_to_all":
        is_double = operation == "all_reduce" or (operation == "reduce_scatter" and not hardware.has_reduce_scatter)
        rounds = 2 if is_double else 1
        inside, outside = rounds * whole * (local - 1) / local, rounds * whole / local * (hosts - 1) / hosts
    per_byte = max(inside / hardware.link_bandwidth, outside / hardware.network_bandwidth)
    return hardware.collective_latency + times * call.bytes * per_byte


IDS, TABLES, OUTPUT, WIRE, DENSE = "ids", "tables", "output", "wire", "dense"
"""The parts of a step: before ids are exchanged; hashing and lookups; after pooled rows have arrived; the collectives;
and what recfx did not make."""

MOST_KINDS = 32
"""If there are more kinds of ranks, this many graphs are made, from the kind with most rows to read down."""


def price_step(
    planned: Sequence[PlannedCollection], trains: bool, values: Values, hardware: Hardware, rest: Totals
) -> tuple[tuple[Totals, ...], dict[str, float]]:
    """The price of one step on all ranks; ``rest`` is what each of them does beside the collections.

    The totals of every rank, whose seconds do not count waiting for other ranks; and the seconds of each part of the
    step, in which ranks wait for each other at every collective.
    """
    alike = _ranks_alike(planned, values)
    known = {rank: _price_rank(planned, rank, trains, values, hardware) for rank in dict.fromkeys(alike)}
    parts = dict.fromkeys((IDS, TABLES, OUTPUT, WIRE), 0.0) | {DENSE: rest.seconds}
    for key in dict.fromkeys(key for rank in known.values() for key in rank.between):
        parts[key[1]] += max(rank.between.get(key, 0.0) for rank in known.values())
    slowest: dict[Hashable, float] = {}  # what one rank sends in the forward it receives in the backward
    calls = [(call[:2] + call[3:], seconds) for rank in known.values() for call, seconds in rank.calls.items()]
    for pair, seconds in calls:
        slowest[pair] = max(slowest.get(pair, 0.0), seconds)
    every = dict.fromkeys(call for rank in known.values() for call in rank.calls)
    parts[WIRE] = sum(slowest[call[:2] + call[3:]] for call in every)
    totals = []
    for rank, like in enumerate(alike):
        resident = sum((collection.residents_of_ranks[rank] for collection in planned), start=rest.resident)
        totals.append(replace(Totals.of([known[like].totals, rest]), resident=resident))
    return tuple(totals), parts


def _ranks_alike(planned: Sequence[PlannedCollection], values: Values) -> list[int]:
    """For each rank, one that costs the same; of many kinds, the next one that has more rows to read."""
    firsts: dict[Hashable, int] = {}
    kinds = list(zip(*(collection.kinds_of_ranks for collection in planned), strict=True))
    alike = [firsts.setdefault(kind, rank) for rank, kind in enumerate(kinds)]
    if len(firsts) <= MOST_KINDS:
        return alike
    work = [0.0] * len(kinds)
    for collection in planned:
        for shard in collection.sharding.by_rank():
            work[shard.rank] += float(shard.expected_ids(values.length)) * shard.num_columns
    ordered = sorted(firsts.values(), key=lambda rank: -work[rank])
    chosen = {}
    for place, rank in enumerate(ordered):
        group = place * MOST_KINDS // len(ordered)
        chosen[rank] = ordered[-(-group * len(ordered) // MOST_KINDS)]
    return [chosen[rank] for rank in alike]


class _PricedRank(NamedTuple):
    """One rank: its totals, and its times between collectives and in each of them."""

    totals: Totals
    between: dict[tuple[int, str, int], float]  # by the number of the collection, part and phase
    calls: dict[tuple[int, str, int, Hashable], float]  # by that number, node, place, and what pairs two calls


def _price_rank(
    planned: Sequence[PlannedCollection], rank: int, trains: bool, values: Values, hardware: Hardware
) -> _PricedRank:
    """Price the graphs of a rank. An all-to-all of ids ends when the rank that receives most has received it."""
    nodes, between, calls = [], dict[tuple[int, str, int], float](), dict[tuple[int, str, int, Hashable], float]()
    for number, collection in enumerate(planned):
        for unpriced in GraphPrices(collection.graph(rank), trains, symbols=values).nodes(collection.calls):
            node = price(unpriced, values, hardware)
            nodes.append(node)
            for phase, seconds in enumerate(seconds_of_phases(node, hardware)):
                key = (number, _part(node.kind), phase)
                between[key] = between.get(key, 0.0) + seconds
            passed, times = sum(call.bytes for call in node.collectives), 1.0
            if node.kind == "input_dist_wait" and passed:
                times = max(1.0, node.forward.read_bytes / passed)
            for place, call in enumerate(node.collectives):
                pair = call.operation if node.kind == "output_dist_start" else place
                seconds = node.calls * seconds_of_call(call, values.world, hardware, times)
                calls[number, node.name, place, pair] = seconds
    return _PricedRank(Totals.of(nodes), between, calls)


def _part(kind: str) -> str:
    stage = NODE_KINDS[kind].stage
    if stage in (Stage.SELECT, Stage.INPUT_DIST):
        return IDS
    return OUTPUT if stage is Stage.ASSEMBLE or kind == "output_dist_wait" else TABLES
