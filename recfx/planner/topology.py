"""What an NPU pod looks like to a planner, and the hardware that a topology describes, for predictions of times.

The numbers of pods are data-sheet peaks of one product, the Atlas 800T A2 (eight Ascend 910B); **nothing here was
measured**. A planner compares options with each other, so the ratios matter more than the absolute numbers; pass your
own numbers if you have measured them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields, replace
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.constants import (
    CROSS_NODE_BANDWIDTH,
    DDR_MEM_BW,
    HBM_MEM_BW,
    HBM_TO_DDR_MEM_BW,
    INTRA_NODE_BANDWIDTH,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

from recfx.collections.pieces import rank_of
from recfx.collections.sharding.plan import MOST_RANKS
from recfx.errors import ConversionError
from recfx.planner.pricing.hardware import ASCEND_910B, CPU_HOST, H100, Constant, Hardware, same_for_all
from recfx.versions.differences import make_topology

# `npu-smi info` shows 65536 MB per device; Rec SDK Torch's patch of TorchRec plans with the same.
HBM_BYTES = 64 * 1024**3
# Host memory varies: up to 32 DDR4 modules per server. Here 1 TiB (32 x 32 GB), divided by eight devices.
DDR_BYTES = 128 * 1024**3
DEVICES_A_SERVER = ASCEND_910B.ranks_per_host
# In both directions. TorchRec's own figure for CUDA (NVLink, 600 GB/s) is also a sum over links and directions.
HCCS_BANDWIDTH = 2 * ASCEND_910B.link_bandwidth["all_to_all"].value
PRIVATE = "privateuseone"
"""What torch calls the device type ``npu`` until torch_npu renames it."""


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
    hbm_bandwidth: float = ASCEND_910B.memory_bandwidth.value
    ddr_bandwidth: float = ASCEND_910B.host_memory_bandwidth.value
    intra_host_bandwidth: float = HCCS_BANDWIDTH
    inter_host_bandwidth: float = ASCEND_910B.network_bandwidth.value

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_number(field.name, getattr(self, field.name))
        if self.world_size % self.local_world_size:
            raise _invalid(
                f"{self.world_size} devices are not a whole number of servers with {self.local_world_size} each.",
                f"pass at most {self.local_world_size} devices, or a multiple of that; or another local_world_size.",
            )

    def as_cuda(self) -> Topology:
        """This pod as TorchRec can plan for it: devices called ``cuda``, bandwidths in bytes per millisecond."""
        return make_topology(
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            compute_device="cuda",
            hbm_cap=self.hbm_cap,
            ddr_cap=self.ddr_cap,
            hbm_mem_bw=self.hbm_bandwidth / 1000,
            ddr_mem_bw=self.ddr_bandwidth / 1000,
            intra_host_bw=self.intra_host_bandwidth / 1000,
            inter_host_bw=self.inter_host_bandwidth / 1000,
        )


def npu_topology(world_size: int, local_world_size: int = DEVICES_A_SERVER, **settings: Any) -> NpuTopology:
    """A pod of ``world_size`` NPUs; if a server has more than that, they are all in one server.

    The other arguments are as for :class:`NpuTopology`; their defaults describe Atlas 800T A2 servers.

    Example:
        >>> from recfx.planner.topology import npu_topology
        >>> topology = npu_topology(16, hbm_cap=32 * 1024**3)  # two servers
        >>> topology.local_world_size
        8
    """
    _check_number("world_size", world_size)
    _check_number("local_world_size", local_world_size)
    return NpuTopology(world_size, min(world_size, local_world_size), **settings)


def replace_placements(plan: ShardingPlan, device: str, local_world_size: int = MOST_RANKS) -> ShardingPlan:
    """A new plan with the shards of ``plan`` on devices of another type: ``rank:3/cuda:3`` becomes ``rank:3/npu:3``.
    Ranks, sizes, kernels and everything else stay the same.

    Args:
        plan: TorchRec's plan for devices that this host lacks.
        device: ``"npu"``, ``"cpu"``, ``"cuda"``, ...
        local_world_size: number of devices per host; a rank's device index is its rank modulo this number.
    """
    if device == "npu" and torch._C._get_privateuse1_backend_name() == PRIVATE:
        device = PRIVATE
    modules: dict[str, Any] = dict(plan.plan)
    for path, tables in modules.items():
        if isinstance(tables, EmbeddingModuleShardingPlan):
            modules[path] = EmbeddingModuleShardingPlan()
            for table, parameter in tables.items():
                spec: Any = parameter.sharding_spec
                if spec is not None:  # or it is data parallel
                    shards = [_placed(shard, device, local_world_size) for shard in spec.shards]
                    spec = EnumerableShardingSpec(shards)
                modules[path][table] = replace(parameter, sharding_spec=spec)
    return ShardingPlan(modules)


def _placed(shard: ShardMetadata, device: str, local_world_size: int) -> ShardMetadata:
    rank = rank_of(shard)
    assert rank is not None, shard
    place = _remote(f"rank:{rank}/cpu" if device == "cpu" else f"rank:{rank}/{device}:{rank % local_world_size}")
    return ShardMetadata(list(shard.shard_offsets), list(shard.shard_sizes), place)


_remote = lru_cache(maxsize=4096)(_remote_device)
"""What ``ShardMetadata`` makes of a placement, for each of a thousand tables on each of a thousand ranks."""

_BANDWIDTHS = {
    "hbm_mem_bw": (HBM_MEM_BW, "memory_bandwidth"),
    "ddr_mem_bw": (DDR_MEM_BW, "host_memory_bandwidth"),
    "hbm_to_ddr_mem_bw": (HBM_TO_DDR_MEM_BW, "copy_bandwidth"),
    "intra_host_bw": (INTRA_NODE_BANDWIDTH, "link_bandwidth"),
    "inter_host_bw": (CROSS_NODE_BANDWIDTH, "network_bandwidth"),
}
"""The bandwidths of a ``Topology``, with TorchRec's defaults and the names of the constants of ``Hardware``."""

AnyTopology: TypeAlias = Topology | NpuTopology


def check_topology(topology: AnyTopology) -> AnyTopology:
    """Refuse a topology without ranks or with memory that is no number (``invalid_topology``)."""
    if isinstance(topology, Topology):
        _check_number("world_size", topology.world_size)
        for rank, device in enumerate(topology.devices):
            if not all(map(math.isfinite, astuple(device.storage))):
                raise _invalid(f"rank {rank} has {device.storage} bytes of memory.", "pass finite numbers of bytes.")
    return topology


def hardware_of(topology: AnyTopology | Hardware) -> Hardware:
    """The bandwidths of a topology; what it does not say is taken from an Ascend 910B, an H100 or a host. Hardware is
    itself.

    The same topology gives the same constants in every process: nothing is measured.
    """
    if isinstance(topology, Hardware):
        return topology
    if isinstance(topology, NpuTopology):
        return replace(
            ASCEND_910B,
            memory_bandwidth=_said(topology.hbm_bandwidth),
            random_access=Constant(64 / topology.hbm_bandwidth, ASCEND_910B.random_access.source),
            host_memory_bandwidth=_said(topology.ddr_bandwidth),
            link_bandwidth=same_for_all(*_said(topology.intra_host_bandwidth / 2, ": half of both directions")),
            network_bandwidth=_said(topology.inter_host_bandwidth),
            ranks_per_host=topology.local_world_size,
        )
    # TorchRec's defaults are those of no device in particular: a topology that has them says nothing.
    said: dict[str, Any] = {
        constant: _said(getattr(topology, name) * 1000)
        for name, (default, constant) in _BANDWIDTHS.items()
        if getattr(topology, name) != default
    }
    if "link_bandwidth" in said:
        said["link_bandwidth"] = same_for_all(*said["link_bandwidth"])
    ranks = topology.local_world_size
    if topology.compute_device == "cpu":
        of_memory = said.get("host_memory_bandwidth", CPU_HOST.memory_bandwidth)
        said |= {"memory_bandwidth": of_memory, "copy_bandwidth": CPU_HOST.copy_bandwidth}
        return replace(CPU_HOST, ranks_per_host=ranks, **said)
    name = "CUDA device" if said else H100.name
    if "memory_bandwidth" in said:
        said["random_access"] = Constant(64 / said["memory_bandwidth"].value, H100.random_access.source)
    return replace(H100, name=name, ranks_per_host=ranks, **said)


def plain_topology(world_size: int, device: str) -> AnyTopology:
    """``world_size`` devices of a type, where nothing else is known of them."""
    return npu_topology(world_size) if device in ("npu", PRIVATE) else make_topology(world_size, device)


def device_of(topology: AnyTopology | Hardware) -> str:
    """The type of device that has the tables; ``""`` for hardware that is no type."""
    if isinstance(topology, Hardware):
        return topology.device
    return "npu" if isinstance(topology, NpuTopology) else str(topology.compute_device)


def device_of_tables(model: nn.Module) -> str:
    """The type of device that has the parameters of a model; ``"cpu"`` if none has data yet."""
    device = next((parameter.device.type for parameter in model.parameters() if not parameter.is_meta), "cpu")
    return "npu" if device == PRIVATE else device


def of_ranks(topology: AnyTopology, world_size: int) -> AnyTopology:
    """Describe the same devices and links for other ranks; if there are fewer than a host has, they are on one host."""
    settings = settings_of(topology)
    return topology_of_settings(settings | {"local_world_size": min(world_size, topology.local_world_size)}, world_size)


def settings_of(topology: AnyTopology) -> dict[str, Any]:
    """What a topology says of every rank, as plain data."""
    if isinstance(topology, NpuTopology):
        settings = {field.name: getattr(topology, field.name) for field in fields(topology)}
        del settings["world_size"]
        return {"device": "npu", **settings}
    storage = topology.devices[0].storage
    return {
        "device": topology.compute_device,
        "local_world_size": topology.local_world_size,
        "hbm_cap": storage.hbm,
        "ddr_cap": storage.ddr,
        **{name: getattr(topology, name) for name in _BANDWIDTHS},
        "bwd_compute_multiplier": topology.bwd_compute_multiplier,
    }


def topology_of_settings(settings: Mapping[str, Any], world_size: Any) -> AnyTopology:
    """The topology of so many ranks of which :func:`settings_of` says this."""
    settings = {**settings, "world_size": world_size}
    device = settings.pop("device")
    return NpuTopology(**settings) if device == "npu" else make_topology(compute_device=device, **settings)


def _check_number(name: str, value: Any) -> None:
    """Refuse what is no finite number above 0, and numbers of ranks that are not whole."""
    whole = name in ("world_size", "local_world_size")
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf or (whole and value > MOST_RANKS):
        above = f" and not above {MOST_RANKS:,}" if whole else ""
        raise _invalid(f"{name} is {value!r}.", f"pass a {'whole' if whole else 'finite'} number above 0{above}.")


def _said(value: float, more: str = "") -> Constant:
    return Constant(value, f"as the topology says{more}")


def _invalid(message: str, what_to_do: str) -> ConversionError:
    return ConversionError(message, reason="invalid_topology", what_to_do=what_to_do)
