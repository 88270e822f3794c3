"""One node's cost in numbers, for a batch on given hardware."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, fields

from recfx.ir.meta import Collective
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.times import seconds_of_collective, seconds_of_work
from recfx.planner.pricing.values import Values
from recfx.planner.pricing.work import NO_RESIDENT, NOTHING, NodeCost, Resident

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
        return Totals(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Totals)))

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
    forward, backward = (work.mapped(values.number) for work in (node.forward, node.backward))
    seconds = sum(seconds_of_phases(node, values, hardware))
    seconds += node.calls * sum(seconds_of_call(call, values, hardware) for call in node.collectives)
    return NodePrice(
        name=node.name,
        kind=node.kind,
        collection=node.collection,
        tables=node.tables,
        read_bytes=node.calls * (forward.read_bytes + backward.read_bytes),
        written_bytes=node.calls * (forward.written_bytes + backward.written_bytes),
        flops=node.calls * (forward.flops + backward.flops),
        wire_bytes=node.calls * sum(float(values.number(call.bytes)) for call in node.collectives),
        resident=node.resident,
        seconds=seconds,
    )


def seconds_of_phases(node: NodeCost, values: Values, hardware: Hardware) -> list[float]:
    """How long the work of the forward takes per step, and that of the backward, without collectives."""
    on_host, works = runs_on_host(node, hardware), (node.forward, node.backward)
    phases = [work.mapped(values.number) for work in works]
    return [node.calls * seconds_of_work(work, hardware, on_host) if work != NOTHING else 0.0 for work in phases]


def seconds_of_call(call: Collective, values: Values, hardware: Hardware, times: float = 1.0) -> float:
    """How long one collective takes that moves so many times what is passed to it."""
    passed, ranks = times * values.number(call.bytes), call.ranks or values.world
    return seconds_of_collective(call.operation, passed, ranks, hardware, across_hosts=call.across_hosts)


def runs_on_host(node: NodeCost, hardware: Hardware) -> bool:
    """Whether a node runs beside the device that has the tables, as indexes do wherever the graph was made."""
    return (node.on_host or node.kind in _INDEX_KINDS) and hardware.host_memory_bandwidth != hardware.memory_bandwidth
