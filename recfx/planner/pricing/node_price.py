"""One node's cost in numbers, for given batches on given hardware.

Expressions are in one batch size for all ranks. Where batches differ in size, a call that sends pooled rows back passes
other numbers of rows, and a reduce-scatter becomes an all-to-all, because its parts are no longer equally large.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from recfx.ir.meta import Collective
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.times import seconds_of_collective, seconds_of_work
from recfx.planner.pricing.values import Values
from recfx.planner.pricing.work import NO_RESIDENT, NOTHING, NodeCost, Resident


class Call(NamedTuple):
    """One collective call in numbers: what a rank passes to it, its own part included, and whether the ranks are on one
    host each.
    """

    operation: str
    passed_bytes: float
    ranks: int
    across_hosts: bool


def calls_of(kind: str, collectives: Sequence[Collective], values: Values) -> list[Call]:
    """The collective calls of a node of some kind, in their order."""
    calls = []
    for collective in collectives:
        operation, passed = collective.operation, float(values.number(collective.bytes))
        if values.sizes and kind == "output_dist_start":
            is_summed = any(other.operation == "reduce_scatter" for other in collectives)
            amounts = values.on_all_ranks(collective.bytes)
            operation, passed = _uneven(collective, is_summed, amounts, values.rank)
        calls.append(Call(operation, passed, collective.ranks or values.world, collective.across_hosts))
    return calls


def _uneven(call: Collective, is_summed: bool, amounts: Sequence[float], rank: int) -> tuple[str, float]:
    """The operation that runs, and its bytes; ``amounts`` are the bytes if all ranks had the batch of each of them,
    ``is_summed`` says whether the node sums over ranks.
    """
    ranks = call.ranks or len(amounts)
    others = len(amounts) // ranks  # groups of as many ranks
    if call.operation == "all_to_all":
        if call.backward:
            return call.operation, amounts[rank]
        receiving = amounts[rank % others :: others] if call.across_hosts else amounts
        return call.operation, sum(receiving) / ranks
    if not is_summed:  # an all-gather, which takes equal sizes
        return call.operation, max(amounts)
    # Each rank of the group gets the samples of its counterparts in all groups.
    parts = [sum(amounts[place::ranks]) for place in range(ranks)]
    are_equal = len(set(parts)) == 1
    if call.operation == "reduce_scatter":
        return call.operation if are_equal else "all_to_all", sum(amounts) / len(amounts)
    own = parts[rank % ranks] / others
    return (call.operation, own) if are_equal else ("all_to_all", ranks * own)


_INDEX_KINDS = frozenset({"hash_ids", "find_ids", "insert_ids"})


@dataclass(frozen=True)
class Totals:
    """The sums over all nodes of one rank per step, forward and backward.

    Args:
        read_bytes: read from memory.
        written_bytes: written to memory.
        flops: floating-point operations.
        wire_bytes: what this rank passes to collectives, its own part included.
        resident: bytes between steps.
        seconds: the predicted time.
    """

    read_bytes: float = 0.0
    written_bytes: float = 0.0
    flops: float = 0.0
    wire_bytes: float = 0.0
    resident: Resident = NO_RESIDENT
    seconds: float = 0.0

    @property
    def resident_bytes(self) -> int:
        return self.resident.total

    def plus(self, other: Totals) -> Totals:
        names = [field.name for field in fields(Totals)]
        return Totals(*(getattr(self, name) + getattr(other, name) for name in names))

    @classmethod
    def of(cls, nodes: Iterable[Totals]) -> Totals:
        return functools.reduce(cls.plus, nodes, cls())


@dataclass(frozen=True)
class _NodeName:
    name: str
    kind: str
    collection: str
    tables: tuple[str, ...]


@dataclass(frozen=True)
class NodePrice(Totals, _NodeName):
    """One node in numbers; its first fields are as in :class:`recfx.planner.pricing.work.NodeCost`."""


def price(node: NodeCost, values: Values, hardware: Hardware) -> NodePrice:
    """The numbers of one node."""
    on_host = runs_on_host(node, hardware)
    phases = [work.mapped(values.number) for work in (node.forward, node.backward)]
    seconds = sum(seconds_of_work(work, hardware, on_host) for work in phases if work != NOTHING)
    wire = 0.0
    for call in calls_of(node.kind, node.collectives, values):
        wire += call.passed_bytes
        seconds += seconds_of_call(call, hardware)
    return NodePrice(
        name=node.name,
        kind=node.kind,
        collection=node.collection,
        tables=node.tables,
        read_bytes=node.calls * sum(work.read_bytes for work in phases),
        written_bytes=node.calls * sum(work.written_bytes for work in phases),
        flops=node.calls * sum(work.flops for work in phases),
        wire_bytes=node.calls * wire,
        resident=node.resident,
        seconds=node.calls * seconds,
    )


def runs_on_host(node: NodeCost, hardware: Hardware) -> bool:
    """Whether a node runs beside the device that has the tables, as indexes do wherever the graph was made."""
    return (node.on_host or node.kind in _INDEX_KINDS) and hardware.host_memory_bandwidth != hardware.memory_bandwidth


def seconds_of_call(call: Call, hardware: Hardware) -> float:
    """How long one collective takes."""
    return seconds_of_collective(
        call.operation, call.passed_bytes, call.ranks, hardware, across_hosts=call.across_hosts
    )
