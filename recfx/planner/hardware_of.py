"""The hardware that a topology describes, for predictions of times."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.constants import INTRA_NODE_BANDWIDTH

from recfx.errors import ConversionError, type_of
from recfx.planner.placements import PRIVATE
from recfx.planner.pricing.hardware import ASCEND_910B, CPU_HOST, H100, Constant, Hardware, same_for_all
from recfx.planner.topology import NpuTopology

AnyTopology: TypeAlias = Topology | NpuTopology

_GIVEN = "as the topology says"


def check_topology(topology: object) -> AnyTopology:
    """Refuse what is no topology.

    Raises:
        ConversionError: ``invalid_topology``.
    """
    if isinstance(topology, (Topology, NpuTopology)):
        return topology
    raise ConversionError(
        f"topology is {type_of(topology)}.",
        reason="invalid_topology",
        what_to_do="pass a torchrec.distributed.planner.Topology or recfx.planner.topology.npu_topology(...).",
    )


def hardware_of(topology: AnyTopology) -> Hardware:
    """The bandwidths of a topology; what it does not say is that of an Ascend 910B, an H100 or a host.

    The same topology gives the same constants in every process: nothing is measured.
    """
    if isinstance(topology, NpuTopology):
        return replace(
            ASCEND_910B,
            memory_bandwidth=Constant(topology.hbm_bandwidth, _GIVEN),
            random_access=Constant(64 / topology.hbm_bandwidth, ASCEND_910B.random_access.source),
            host_memory_bandwidth=Constant(topology.ddr_bandwidth, _GIVEN),
            link_bandwidth=same_for_all(topology.intra_host_bandwidth / 2, f"{_GIVEN}: half of both directions"),
            network_bandwidth=Constant(topology.inter_host_bandwidth, _GIVEN),
            ranks_per_host=topology.local_world_size,
        )
    host = Constant(topology.ddr_mem_bw * 1000, _GIVEN)
    network = Constant(topology.inter_host_bw * 1000, _GIVEN)
    link = same_for_all(topology.intra_host_bw * 1000, _GIVEN)
    if topology.compute_device == "cpu":
        # TorchRec's default is the bandwidth of links between GPUs, which no host has.
        own = topology.intra_host_bw != INTRA_NODE_BANDWIDTH
        return replace(
            CPU_HOST,
            memory_bandwidth=host,
            host_memory_bandwidth=host,
            link_bandwidth=link if own else CPU_HOST.link_bandwidth,
            network_bandwidth=network,
            ranks_per_host=topology.local_world_size,
        )
    memory = topology.hbm_mem_bw * 1000
    return replace(
        H100,
        name="CUDA device",
        memory_bandwidth=Constant(memory, _GIVEN),
        random_access=Constant(64 / memory, H100.random_access.source),
        host_memory_bandwidth=host,
        copy_bandwidth=Constant(topology.hbm_to_ddr_mem_bw * 1000, _GIVEN),
        link_bandwidth=link,
        network_bandwidth=network,
        ranks_per_host=topology.local_world_size,
    )


def device_of(topology: AnyTopology) -> str:
    """The type of device that has the tables."""
    return "npu" if isinstance(topology, NpuTopology) else str(topology.compute_device)


def device_of_tables(model: nn.Module) -> str:
    """The type of device that has the parameters of a model; ``"cpu"`` if none has data yet."""
    found = next((each.device.type for each in model.parameters() if not each.is_meta), "cpu")
    return "npu" if found == PRIVATE else found


def chip_of(topology: AnyTopology | Hardware | None, device: str) -> str | None:
    """The chip whose limits kernels for a type of device have to fit; None where there are no such limits."""
    if isinstance(topology, Hardware):
        return topology.chip or None
    return ASCEND_910B.chip if device == "npu" else None


def of_ranks(topology: AnyTopology, world_size: int) -> AnyTopology:
    """Describe the same devices and links for other ranks; if there are fewer than a host has, they are on one host."""
    local = min(world_size, topology.local_world_size)
    if isinstance(topology, NpuTopology):
        return replace(topology, world_size=world_size, local_world_size=local)
    storage = topology.devices[0].storage
    return Topology(
        world_size=world_size,
        local_world_size=local,
        compute_device=topology.compute_device,
        hbm_cap=storage.hbm,
        ddr_cap=storage.ddr,
        hbm_mem_bw=topology.hbm_mem_bw,
        ddr_mem_bw=topology.ddr_mem_bw,
        hbm_to_ddr_mem_bw=topology.hbm_to_ddr_mem_bw,
        intra_host_bw=topology.intra_host_bw,
        inter_host_bw=topology.inter_host_bw,
        bwd_compute_multiplier=topology.bwd_compute_multiplier,
        created_by_factory=True,
    )
