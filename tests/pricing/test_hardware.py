"""Constants of hardware: each with its source, measured or known; and the times that follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import table_wise

import recfx
from recfx.planner.pricing.hardware import (
    CPU_HOST,
    GB,
    H100,
    Constant,
    same_for_all,
)
from recfx.planner.pricing.step_price import seconds_of_collective, seconds_of_work
from recfx.planner.pricing.work import Work
from recfx.planner.topology import hardware_of, npu_topology, of_ranks
from tests.builders.collections import collection
from tests.builders.plans import plan_of_kinds


def test_the_numbers_of_a_topology() -> None:
    npu = hardware_of(npu_topology(16, hbm_bandwidth=2e12, intra_host_bandwidth=4e11))
    assert (npu.memory_bandwidth.value, npu.link_bandwidth["all_to_all"].value) == (2e12, 2e11)
    cuda = hardware_of(Topology(8, "cuda", hbm_mem_bw=1e9, inter_host_bw=2e7, local_world_size=4))
    assert (cuda.memory_bandwidth.value, cuda.network_bandwidth.value, cuda.ranks_per_host) == (1e12, 2e10, 4)
    # TorchRec's defaults are those of no device in particular.
    assert hardware_of(Topology(8, "cpu")) == CPU_HOST
    assert hardware_of(Topology(8, "cuda")) == H100
    assert hardware_of(Topology(2, "cpu", intra_host_bw=3e6)).link_bandwidth["all_gather"].value == 3e9


@pytest.mark.parametrize("topology", [npu_topology(16), Topology(16, "cuda", local_world_size=8, hbm_mem_bw=1e9)])
def test_the_same_devices_for_other_numbers_of_ranks(topology: Topology) -> None:
    small, large = of_ranks(topology, 4), of_ranks(topology, 1024)
    assert (small.world_size, small.local_world_size) == (4, 4)
    assert (large.world_size, large.local_world_size) == (1024, 8)
    assert hardware_of(large) == hardware_of(topology)


def test_indexes_and_tables_have_a_time_of_their_own() -> None:
    """On a host, an access to an index takes another time than one to a row; a copy of it on a device does not."""
    host = replace(
        CPU_HOST,
        node_overhead=Constant(0.0, ""),
        table_overhead=Constant(1.0, ""),
        index_overhead=Constant(10.0, ""),
        range_overhead=Constant(0.5, ""),
        random_access=Constant(100.0, ""),
        host_random_access=Constant(1000.0, ""),
    )
    assert seconds_of_work(Work(tables=2, indexes=3, copied_ranges=4), host) == 34
    assert seconds_of_work(Work(random_accesses=2, index_accesses=3), host) == 3200
    device = replace(host, host_memory_bandwidth=Constant(1.0, ""))
    assert seconds_of_work(Work(random_accesses=2, index_accesses=3), device) == 500
    assert seconds_of_work(Work(random_accesses=2, index_accesses=3), device, on_host=True) == 5000


@pytest.mark.parametrize(
    ("operation", "inside", "outside"),
    [
        ("all_to_all", 7 / 12, 4 / 12),
        ("reduce_scatter", 7 / 8, 1 / 8 / 2),
        ("all_gather", 12 * 7 / 8, 12 / 8 / 2),
        ("all_reduce", 2 * 7 / 8, 2 / 8 / 2),
    ],
)
def test_ranks_that_do_not_fill_their_last_host(operation: str, inside: float, outside: float) -> None:
    """12 ranks on hosts of 8 are on two hosts: what a rank passes, in parts that stay on its host and that leave it."""
    own_host = replace(H100, network_bandwidth=Constant(1e30, ""))
    network = replace(H100, link_bandwidth=same_for_all(1e30, ""))
    latency = H100.collective_latency[operation].value
    seconds = [seconds_of_collective(operation, 450 * GB, 12, hardware) - latency for hardware in (own_host, network)]
    link = H100.link_bandwidth[operation].value / (450 * GB)
    assert seconds == [pytest.approx(inside / link), pytest.approx(outside * 450 / 50)]


def test_ranks_of_one_host_share_its_links_and_those_of_two_do_not() -> None:
    """All tables are on rank 0: on one host its memory does all the work; over hosts, all wait for its own network."""
    shared, own = replace(CPU_HOST, links_are_shared=True), replace(CPU_HOST, links_are_shared=False)
    model = nn.ModuleDict({"ebc": collection(64)})
    table = table_wise(rank=0)
    wire = {}
    for world_size in (2, 4):
        plan = plan_of_kinds("ebc", model["ebc"], {"t1": table, "t2": table}, world_size, local_size=2)
        for name, hardware in {"shared": shared, "own": own}.items():
            on_hosts_of_two = replace(hardware, ranks_per_host=2)
            cost = recfx.cost(model, on_hosts_of_two, plan=plan, world_size=world_size)
            step = cost.at(100_000, L=10).step
            assert step is not None
            wire[name, world_size] = step.parts["wire"]
    assert wire["shared", 2] < 0.9 * wire["own", 2]
    assert wire["shared", 4] == wire["own", 4]
