"""What an NPU pod looks like to a planner, and the hardware that a topology describes, for predictions of times.

The numbers of pods are data-sheet peaks of one product, the Atlas 800T A2 (eight Ascend 910B); **nothing here was
measured**. A planner compares options with each other, so the ratios matter more than the absolute numbers; pass your
own numbers if you have measured them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeAlias

from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.constants import INTRA_NODE_BANDWIDTH

from recfx.errors import ConversionError, type_of
from recfx.planner.placements import PRIVATE
from recfx.planner.pricing.hardware import ASCEND_910B, CPU_HOST, H100, Constant, Hardware, same_for_all

GB, GIB = 10**9, 1024**3

# 64 GB of HBM2e per device. `npu-smi info` shows 65536 MB; Rec SDK Torch's patch of TorchRec plans with the same.
HBM_BYTES = 64 * GIB
# 1.6 TB/s: the 910B's HBM2e, according to its specification tables.
HBM_BANDWIDTH = 1600 * GB
# 392 GB/s: seven HCCS links per device, one to each other device of the server, with 56 GB/s in both directions
# together. TorchRec's own figure for CUDA (NVLink, 600 GB/s) is also a sum over links and directions.
HCCS_BANDWIDTH = 392 * GB
# 25 GB/s: one 200 Gbit/s RoCE port per device.
ROCE_BANDWIDTH = 25 * GB
# Host memory varies: up to 32 DDR4 modules per server. Here 1 TiB (32 x 32 GB), divided by eight devices.
DDR_BYTES = 128 * GIB
# Four Kunpeng 920 with eight channels of DDR4-3200 (25.6 GB/s) each, divided by eight devices.
DDR_BANDWIDTH = 4 * 8 * 25.6 * GB / 8
DEVICES_A_SERVER = 8


@dataclass(frozen=True)
class NpuTopology:
    """A pod of equal NPU servers, for ``recfx.plan``; TorchRec's ``Topology`` knows no NPU.

    Args:
        world_size: total number of devices.
        local_world_size: devices per server.
        hbm_cap: bytes of device memory per device.
        ddr_cap: bytes of host memory per device; the indexes of hashed tables are there.
        hbm_bandwidth: device memory bandwidth, in bytes per second per device.
        ddr_bandwidth: host memory bandwidth, in bytes per second per device.
        intra_host_bandwidth: bytes per second per device between the devices of a server.
        inter_host_bandwidth: bytes per second per device between servers.

    Raises:
        ConversionError: ``invalid_topology``.
    """

    world_size: int
    local_world_size: int
    hbm_cap: int = HBM_BYTES
    ddr_cap: int = DDR_BYTES
    hbm_bandwidth: float = HBM_BANDWIDTH
    ddr_bandwidth: float = DDR_BANDWIDTH
    intra_host_bandwidth: float = HCCS_BANDWIDTH
    inter_host_bandwidth: float = ROCE_BANDWIDTH

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise _invalid(f"{field.name} is {getattr(self, field.name)!r}.", "pass a number above 0.")
        if self.world_size % self.local_world_size:
            raise _invalid(
                f"{self.world_size} devices are not a whole number of servers with {self.local_world_size} each.",
                "pass a local_world_size that divides world_size.",
            )

    def as_cuda(self) -> Topology:
        """This pod as TorchRec can plan for it: devices called ``cuda``, bandwidths in bytes per millisecond."""
        return Topology(
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            compute_device="cuda",
            hbm_cap=self.hbm_cap,
            ddr_cap=self.ddr_cap,
            hbm_mem_bw=self.hbm_bandwidth / 1000,
            ddr_mem_bw=self.ddr_bandwidth / 1000,
            intra_host_bw=self.intra_host_bandwidth / 1000,
            inter_host_bw=self.inter_host_bandwidth / 1000,
            created_by_factory=True,  # otherwise it warns that "the job will fail", which is about Meta's launcher
        )


def npu_topology(
    world_size: int,
    local_world_size: int = DEVICES_A_SERVER,
    *,
    hbm_cap: int = HBM_BYTES,
    ddr_cap: int = DDR_BYTES,
    hbm_bandwidth: float = HBM_BANDWIDTH,
    ddr_bandwidth: float = DDR_BANDWIDTH,
    intra_host_bandwidth: float = HCCS_BANDWIDTH,
    inter_host_bandwidth: float = ROCE_BANDWIDTH,
) -> NpuTopology:
    """A pod of ``world_size`` NPUs; if a server has more than that, they are all in one server.

    The other arguments are those of :class:`NpuTopology`; by default, those of Atlas 800T A2 servers.
    """
    return NpuTopology(
        world_size,
        min(world_size, local_world_size),
        hbm_cap,
        ddr_cap,
        hbm_bandwidth,
        ddr_bandwidth,
        intra_host_bandwidth,
        inter_host_bandwidth,
    )


def _invalid(message: str, what_to_do: str) -> ConversionError:
    return ConversionError(message, reason="invalid_topology", what_to_do=what_to_do)


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
