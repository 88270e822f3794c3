"""What every rank of a sharded model costs in numbers, and how long the ranks need together."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from recfx.ir.node_kinds import NODE_KINDS, Stage
from recfx.planner.pricing.formulas import formula_of
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.node_facts import PlannedNode
from recfx.planner.pricing.node_price import Totals, calls_of, seconds_of_call
from recfx.planner.pricing.planned_nodes import PlannedGraphs
from recfx.planner.pricing.times import seconds_of_ranks, seconds_of_work
from recfx.planner.pricing.values import Values
from recfx.planner.pricing.work import NOTHING, Work

IDS, TABLES, OUTPUT, WIRE, DENSE = "ids", "tables", "output", "wire", "dense"
"""The parts of a step: before ids are exchanged; hashing and lookups; after pooled rows have arrived; the collectives;
and what recfx did not make."""


@dataclass(frozen=True)
class StepPrice:
    """All ranks, in numbers.

    Args:
        ranks: the totals of every rank; their seconds do not count waiting for other ranks.
        seconds: the predicted time of a step, in which ranks wait for each other at every collective.
        parts: how it is made up, by part of a step.
    """

    ranks: tuple[Totals, ...]
    seconds: float
    parts: dict[str, float]

    @property
    def imbalance(self) -> float:
        """The time of the slowest rank over the mean of all ranks, 1 if all are equal."""
        times = [rank.seconds for rank in self.ranks]
        return max(1.0, max(times) * len(times) / sum(times)) if sum(times) else 1.0  # sums are rounded


class _NodeCall(NamedTuple):
    """One collective of a node; ``pair`` is equal for a call of the forward and the one of the backward that takes the
    opposite way.
    """

    collection: int
    node: str
    number: int
    pair: str


@dataclass
class _PricedRank:
    """One rank: its totals, the times between collectives, and those of the collectives by node and operation."""

    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    between: dict[tuple[int, str, int], float] = field(default_factory=dict)
    calls: dict[_NodeCall, float] = field(default_factory=dict)

    def add(self, *, read: float = 0, written: float = 0, flops: float = 0, wire: float = 0, seconds: float) -> None:
        self.sums = [*map(operator.add, self.sums, (read, written, flops, wire, seconds))]

    @cached_property
    def totals(self) -> Totals:
        read, written, flops, wire, seconds = self.sums
        return Totals(read, written, flops, wire, seconds=seconds)


class _Phase(NamedTuple):
    """What a node does in the forward or in the backward, in numbers."""

    size: Work
    seconds: float


class Batch(NamedTuple):
    """What ranks do, all alike or one: their graphs, made with the numbers of ``values``, and what else the rank has
    and does.
    """

    collections: Sequence[PlannedGraphs]
    values: Values
    rest: Totals | None = None


def price_step(batches: Sequence[Batch], hardware: Hardware, *, with_residents: bool = True) -> StepPrice:
    """The price of one step on all ranks, given one batch for all or one for each."""
    world = max((graphs.world_size for graphs in batches[0].collections), default=1)
    known: dict[Hashable, _PricedRank] = {}
    alike: dict[Hashable, Sequence[_Phase]] = {}
    ranks: list[_PricedRank] = []
    totals = []
    for rank in range(world):
        number = rank if len(batches) > 1 else 0
        collections, values, rest = batches[number]
        kind = (number, *(graphs.kind_of_rank(rank) for graphs in collections))
        if kind not in known:
            known[kind] = _price_rank(collections, rank, values, hardware, alike)
        ranks.append(known[kind])
        own = known[kind].totals
        if with_residents:  # ranks that do the same may keep indexes of different sizes
            own = replace(own, resident=sum((graphs.resident(rank) for graphs in collections), start=own.resident))
        totals.append(own if rest is None else own.plus(rest))
    parts = dict.fromkeys((IDS, TABLES, OUTPUT, WIRE), 0.0)
    if batches[0].rest is not None:
        parts[DENSE] = max(batch.rest.seconds for batch in batches if batch.rest is not None)
    # Ranks of one kind take equally long, so one of each will do, unless it matters how many wait.
    working = ranks if hardware.speed_alone.value != 1 else list(known.values())
    for part in dict.fromkeys(key for rank in known.values() for key in rank.between):
        parts[part[1]] += seconds_of_ranks([rank.between.get(part, 0.0) for rank in working], hardware)
    parts[WIRE] += _on_the_wire(ranks, hardware, world)
    return StepPrice(tuple(totals), sum(parts.values()), parts)


def _on_the_wire(ranks: list[_PricedRank], hardware: Hardware, world: int) -> float:
    """The seconds of all collectives, each of which ends when the last rank has what it needs."""
    calls = dict.fromkeys(call for rank in ranks for call in rank.calls)
    if _share_a_memory(hardware, world):
        return sum(sum(rank.calls.get(call, 0.0) for rank in ranks) / len(ranks) for call in calls)
    slowest: dict[tuple[int, str, str], float] = {}  # what one rank sends in the forward it receives in the backward
    for call in calls:
        pair = (call.collection, call.node, call.pair)
        slowest[pair] = max(slowest.get(pair, 0.0), *(rank.calls.get(call, 0.0) for rank in ranks))
    return sum(slowest[call.collection, call.node, call.pair] for call in calls)


def _price_rank(
    collections: Sequence[PlannedGraphs],
    rank: int,
    values: Values,
    hardware: Hardware,
    alike: dict[Hashable, Sequence[_Phase]],
) -> _PricedRank:
    priced = _PricedRank()
    for number, graphs in enumerate(collections):
        calls, is_numbers = graphs.planned.calls, graphs.is_numbers
        for node in graphs.nodes(rank):
            for backward, (size, once) in enumerate(
                _priced_phases(node, None if is_numbers else values, hardware, alike)
            ):
                seconds = calls * once
                key = (number, _part(node.facts.kind), backward)
                priced.between[key] = priced.between.get(key, 0.0) + seconds
                read, written, flops = (calls * amount for amount in (size.read_bytes, size.written_bytes, size.flops))
                priced.add(read=read, written=written, flops=flops, seconds=seconds)
            _add_calls(priced, number, node, values, hardware, calls)
    return priced


def _priced_phases(
    node: PlannedNode, values: Values | None, hardware: Hardware, alike: dict[Hashable, Sequence[_Phase]]
) -> Sequence[_Phase]:
    """The forward and the backward of a node; ``values`` are those of its expressions, if it has any. Many nodes are
    the same on many ranks: ``alike`` has those that are known.
    """
    facts, key = node.facts, None if values is not None else (node.facts, node.on_host)
    known = None if key is None else alike.get(key)
    if known is not None:
        return known
    phases = formula_of(facts.kind)(facts)
    sizes = [size if values is None else size.mapped(values.number) for size in (phases.forward, phases.backward)]
    priced = [_Phase(size, seconds_of_work(size, hardware, node.on_host) if size != NOTHING else 0.0) for size in sizes]
    if key is not None:
        alike[key] = priced
    return priced


def _add_calls(
    priced: _PricedRank, number: int, node: PlannedNode, values: Values, hardware: Hardware, calls: int
) -> None:
    """Add a node's collectives. An all-to-all ends when the rank that receives most has received it."""
    arriving = 1.0 if _share_a_memory(hardware, values.world) else _arriving(node, values)
    for place, call in enumerate(calls_of(node.facts.kind, node.collectives, values)):
        passed = call.passed_bytes
        seconds = calls * seconds_of_call(call._replace(passed_bytes=passed * arriving), hardware)
        paired = node.facts.kind == "output_dist_start"
        priced.calls[_NodeCall(number, node.name, place, call.operation if paired else str(place))] = seconds
        priced.add(wire=calls * passed, seconds=seconds)


def _share_a_memory(hardware: Hardware, world: int) -> bool:
    """Whether all that ranks send goes through the memory of one host, so that it does not matter who sends it."""
    return hardware.links_are_shared and world <= hardware.ranks_per_host


def _arriving(node: PlannedNode, values: Values) -> float:
    """How much more ids arrive than are sent, if they do."""
    facts = node.facts
    if facts.kind != "input_dist_wait" or not node.collectives:
        return 1.0
    passed = sum(call.passed_bytes for call in calls_of(facts.kind, node.collectives, values))
    per_id = 8 + (4 if facts.is_weighted else 0)
    arriving = per_id * values.number(facts.ids) + 8 * values.number(facts.bags)
    return max(1.0, arriving / passed) if passed else 1.0


def _part(kind: str) -> str:
    stage = NODE_KINDS[kind].stage
    if stage in (Stage.SELECT, Stage.INPUT_DIST):
        return IDS
    return OUTPUT if stage is Stage.ASSEMBLE or kind == "output_dist_wait" else TABLES
