"""One node's cost in numbers, for a batch on given hardware; and how long work and collectives take."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from recfx.ir.meta import Collective
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.node_facts import Values
from recfx.planner.pricing.work import NO_RESIDENT, NOTHING, NodeCost, Resident, Work

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
class NodePrice(Totals):
    """One node in numbers; its last fields are as in :class:`recfx.planner.pricing.work.NodeCost`."""

    name: str = ""
    kind: str = ""
    collection: str = ""
    tables: tuple[str, ...] = ()


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


def seconds_of_work(work: Work, hardware: Hardware, on_host: bool = False) -> float:
    """The time of one phase, whose amounts are numbers: its parts one after the other, and the overheads."""
    bandwidth = hardware.host_memory_bandwidth if on_host else hardware.memory_bandwidth
    miss = hardware.host_random_access if on_host else hardware.random_access
    # A host has both its tables and its indexes in one memory, but an index does more per access than a table.
    has_indexes = on_host or hardware.host_memory_bandwidth == hardware.memory_bandwidth
    index_miss = hardware.host_random_access if has_indexes else hardware.random_access
    return (
        hardware.node_overhead.value
        + (work.read_bytes + work.written_bytes) / bandwidth.value
        + work.random_accesses * miss.value
        + work.index_accesses * index_miss.value
        + work.flops / hardware.flops.value
        + work.copied_bytes / hardware.copy_bandwidth.value
        + work.sorted_ids * hardware.sort_per_id.value
        + work.tables * hardware.table_overhead.value
        + work.indexes * hardware.index_overhead.value
        + work.copied_ranges * hardware.range_overhead.value
    )


def seconds_of_collective(
    operation: str, passed_bytes: float, ranks: int, hardware: Hardware, *, across_hosts: bool = False
) -> float:
    """How long a collective takes after all ranks have come to it, where a rank passes ``passed_bytes`` to it.

    A rank keeps its own part. Of the rest, an all-to-all sends what other hosts need over the network. The other
    operations do so only once per host, because the ranks of a host first add up their parts, or share what arrived. An
    all-reduce is a reduce-scatter and an all-gather. With ``across_hosts``, the ranks are on a host each.
    """
    if ranks <= 1:
        return 0.0
    local = 1 if across_hosts else min(ranks, hardware.ranks_per_host)
    hosts = math.ceil(ranks / local)
    link, network = hardware.link_bandwidth[operation].value, hardware.network_bandwidth.value
    whole = passed_bytes * ranks if operation == "all_gather" else passed_bytes
    inside, outside = whole * (local - 1) / ranks, whole * (ranks - local) / ranks
    if operation != "all_to_all":
        rounds = 2 if operation == "all_reduce" else 1
        inside, outside = rounds * whole * (local - 1) / local, rounds * whole / local * (hosts - 1) / hosts
    return hardware.collective_latency[operation].value + max(inside / link, outside / network)
