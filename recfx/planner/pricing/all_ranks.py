"""What every rank of a sharded model costs, and how long a step takes in which the ranks wait for each other."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from recfx.ir.node_kinds import NODE_KINDS, Stage
from recfx.planner.pricing.graph_prices import price_graph
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.node_facts import Values
from recfx.planner.pricing.node_price import Totals, price, seconds_of_call, seconds_of_phases
from recfx.planner.pricing.planned_collection import PlannedCollection
from recfx.planner.pricing.work import NodeCost

IDS, TABLES, OUTPUT, WIRE, DENSE = "ids", "tables", "output", "wire", "dense"
"""The parts of a step: before ids are exchanged; hashing and lookups; after pooled rows have arrived; the collectives;
and what recfx did not make."""

MOST_KINDS = 32
"""If there are more kinds of ranks, this many graphs are made, from the kind with most rows to read down."""


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


@dataclass
class _PricedRank:
    """One rank: its totals, and its times between collectives and in each of them."""

    totals: Totals = field(default_factory=Totals)
    between: dict[tuple[int, str, int], float] = field(default_factory=dict)  # by collection, part and phase
    calls: dict[tuple[int, str, int, Hashable], float] = field(default_factory=dict)  # see _add_calls


def price_step(
    planned: Sequence[PlannedCollection], trains: bool, values: Values, hardware: Hardware, rest: Totals
) -> StepPrice:
    """The price of one step on all ranks; ``rest`` is what each of them does beside the collections."""
    shared = hardware.links_are_shared and values.world <= hardware.ranks_per_host
    alike = _ranks_alike(planned, values)
    known = {rank: _price_rank(planned, rank, trains, values, hardware, shared) for rank in dict.fromkeys(alike)}
    parts = dict.fromkeys((IDS, TABLES, OUTPUT, WIRE), 0.0) | {DENSE: rest.seconds}
    for key in dict.fromkeys(key for rank in known.values() for key in rank.between):
        parts[key[1]] += max(rank.between.get(key, 0.0) for rank in known.values())
    calls = dict.fromkeys(call for rank in known.values() for call in rank.calls)
    if shared:
        parts[WIRE] = sum(known[rank].calls.get(call, 0.0) for rank in alike for call in calls) / len(alike)
    else:
        slowest: dict[Hashable, float] = {}  # what one rank sends in the forward it receives in the backward
        for call in calls:
            pair = call[:2] + call[3:]
            slowest[pair] = max(slowest.get(pair, 0.0), *(rank.calls.get(call, 0.0) for rank in known.values()))
        parts[WIRE] = sum(slowest[call[:2] + call[3:]] for call in calls)
    totals = []
    for rank, like in enumerate(alike):
        resident = sum((collection.residents_of_ranks[rank] for collection in planned), start=rest.resident)
        totals.append(replace(known[like].totals.plus(rest), resident=resident))
    return StepPrice(tuple(totals), sum(parts.values()), parts)


def _ranks_alike(planned: Sequence[PlannedCollection], values: Values) -> list[int]:
    """For each rank, one that costs the same; of many kinds, the next one that has more rows to read."""
    firsts: dict[Hashable, int] = {}
    kinds = list(zip(*(collection.kinds_of_ranks for collection in planned), strict=True))
    alike = [firsts.setdefault(kind, rank) for rank, kind in enumerate(kinds)]
    if len(firsts) <= MOST_KINDS:
        return alike
    length, work = values.symbols.length, [0.0] * len(kinds)
    for collection in planned:
        for shard in collection.sharding.by_rank():
            work[shard.rank] += float(shard.expected_ids(length)) * shard.num_columns
    ordered = sorted(firsts.values(), key=lambda rank: -work[rank])
    chosen = {}
    for place, rank in enumerate(ordered):
        group = place * MOST_KINDS // len(ordered)
        chosen[rank] = ordered[-(-group * len(ordered) // MOST_KINDS)]
    return [chosen[rank] for rank in alike]


def _price_rank(
    planned: Sequence[PlannedCollection], rank: int, trains: bool, values: Values, hardware: Hardware, shared: bool
) -> _PricedRank:
    priced = _PricedRank()
    for number, collection in enumerate(planned):
        for node in price_graph(collection.graph(rank), trains, collection.calls, symbols=values.symbols):
            totals = price(node, values, hardware)
            priced.totals = priced.totals.plus(totals)
            for phase, seconds in enumerate(seconds_of_phases(node, values, hardware)):
                key = (number, _part(node.kind), phase)
                priced.between[key] = priced.between.get(key, 0.0) + seconds
            _add_calls(priced, number, node, values, hardware, shared)
    return priced


def _add_calls(
    priced: _PricedRank, number: int, node: NodeCost, values: Values, hardware: Hardware, shared: bool
) -> None:
    """Add a node's collectives. An all-to-all of ids ends when the rank that receives most has received it; equal last
    entries of a key are a call of the forward and the one of the backward that takes the opposite way.
    """
    passed, times = sum(values.number(call.bytes) for call in node.collectives), 1.0
    if node.kind == "input_dist_wait" and passed and not shared:
        times = max(1.0, node.forward.read_bytes / passed)
    for place, call in enumerate(node.collectives):
        pair = call.operation if node.kind == "output_dist_start" else place
        seconds = node.calls * seconds_of_call(call, values, hardware, times)
        priced.calls[number, node.name, place, pair] = seconds


def _part(kind: str) -> str:
    stage = NODE_KINDS[kind].stage
    if stage in (Stage.SELECT, Stage.INPUT_DIST):
        return IDS
    return OUTPUT if stage is Stage.ASSEMBLE or kind == "output_dist_wait" else TABLES
