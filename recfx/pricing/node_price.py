"""One node's cost in numbers, for given batches on given hardware."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from recfx.pricing.hardware import Hardware
from recfx.pricing.times import WorkAt, seconds_of_collective, seconds_of_work
from recfx.pricing.values import Values
from recfx.pricing.work import NodeCost, Resident, Work

_INDEX_KINDS = frozenset({"hash_ids", "find_ids", "insert_ids"})


@dataclass(frozen=True)
class NodePrice:
    """What one node costs per step, on one rank.

    Args:
        name: as in :class:`recfx.pricing.work.NodeCost`, and so are the other fields, in numbers.
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
    on_host = node.kind in _INDEX_KINDS and hardware.host_memory_bandwidth != hardware.memory_bandwidth
    phases = [work_at(work, values) for work in (node.forward, node.backward)]
    seconds = sum(seconds_of_work(work, hardware, on_host) for work in phases if any(work))
    wire = 0.0
    for collective in node.collectives:
        passed = values.number(collective.bytes)
        wire += passed
        seconds += seconds_of_collective(collective.operation, passed, values.world, hardware)
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


def work_at(work: Work, values: Values) -> WorkAt:
    """The numbers of one phase."""
    return WorkAt(*(values.number(getattr(work, each.name)) for each in fields(work)))


@dataclass(frozen=True)
class Totals:
    """The sums over all nodes of one rank; fields as in :class:`NodePrice`."""

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

    @classmethod
    def of(cls, nodes: Iterable[NodePrice]) -> Totals:
        """The sums over ``nodes``."""
        read = written = flops = wire = seconds = 0.0
        resident = Resident()
        for node in nodes:
            read, written, flops = read + node.read_bytes, written + node.written_bytes, flops + node.flops
            wire, seconds, resident = wire + node.wire_bytes, seconds + node.seconds, resident + node.resident
        return cls(read, written, flops, wire, resident, seconds)
