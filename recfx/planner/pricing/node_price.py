"""One node's cost in numbers, for given batches on given hardware."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.times import WorkAt, seconds_of_collective, seconds_of_work
from recfx.planner.pricing.uneven import Call, calls_of
from recfx.planner.pricing.values import Values
from recfx.planner.pricing.work import NO_RESIDENT, NodeCost, Resident, Work

_INDEX_KINDS = frozenset({"hash_ids", "find_ids", "insert_ids"})


@dataclass(frozen=True)
class NodePrice:
    """What one node costs per step, on one rank.

    Args:
        name: as in :class:`recfx.planner.pricing.work.NodeCost`, and so are the other fields, in numbers.
        kind: see there.
        collection: see there.
        tables: see there.
        read_bytes: forward and backward.
        written_bytes: forward and backward.
        flops: forward and backward.
        wire_bytes: what this rank passes to collectives, its own part included.
        resident: bytes between steps.
        seconds: the predicted time of the node.
    """

    name: str
    kind: str
    collection: str
    tables: tuple[str, ...]
    read_bytes: float
    written_bytes: float
    flops: float
    wire_bytes: float
    resident: Resident
    seconds: float

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay in memory between steps."""
        return self.resident.total


def price(node: NodeCost, values: Values, hardware: Hardware) -> NodePrice:
    """The numbers of one node."""
    on_host = runs_on_host(node, hardware)
    phases = [work_at(work, values) for work in (node.forward, node.backward)]
    seconds = sum(seconds_of_work(work, hardware, on_host) for work in phases if any(work))
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


def work_at(work: Work, values: Values) -> WorkAt:
    """The numbers of one phase."""
    return WorkAt(*(values.number(getattr(work, each.name)) for each in fields(work)))


@dataclass(frozen=True)
class Totals:
    """The sums over all nodes of one rank; fields as in :class:`NodePrice`."""

    read_bytes: float = 0.0
    written_bytes: float = 0.0
    flops: float = 0.0
    wire_bytes: float = 0.0
    resident: Resident = NO_RESIDENT
    seconds: float = 0.0

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay in memory between steps."""
        return self.resident.total

    def plus(self, other: Totals | NodePrice) -> Totals:
        """The sum of both."""
        return Totals(
            read_bytes=self.read_bytes + other.read_bytes,
            written_bytes=self.written_bytes + other.written_bytes,
            flops=self.flops + other.flops,
            wire_bytes=self.wire_bytes + other.wire_bytes,
            resident=self.resident + other.resident,
            seconds=self.seconds + other.seconds,
        )

    @classmethod
    def of(cls, nodes: Iterable[NodePrice]) -> Totals:
        """The sums over ``nodes``."""
        found = cls()
        for node in nodes:
            found = found.plus(node)
        return found
