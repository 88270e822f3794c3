"""Predicts times: how long the work of a node takes on some hardware, and how long its collectives take."""

from __future__ import annotations

import math

from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.work import Work


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
