"""What an NPU pod looks like to a planner, and the hardware that a topology describes, for predictions of times.

The numbers of pods are data-sheet peaks of one product, the Atlas 800T A2 (eight Ascend 910B); **nothing here was
measured**. A planner compares options with each other, so the ratios matter more than the absolute numbers; pass your
own numbers if you have measured them.
"""

import math
from dataclasses import astuple, replace
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.constants import (
    CROSS_NODE_BANDWIDTH,
    DDR_MEM_BW,
    HBM_MEM_BW,
    HBM_TO_DDR_MEM_BW,
    INTRA_NODE_BANDWIDTH,
)
from torchrec.distributed.types import ShardingPlan

from recfx.collections.pieces import rank_of
from recfx.collections.sharding.plan import MOST_RANKS
from recfx.errors import ConversionError
from recfx.planner.pricing.hardware import ASCEND_910B, CPU_HOST, H100, Hardware
from recfx.versions.differences import BY_FACTORY, make_topology

# `npu-smi info` shows 65536 MB per device; Rec SDK Torch's patch of TorchRec plans with the same.
HBM_BYTES = 64 * 1024**3
# Host memory varies: up to 32 DDR4 modules per server. Here 1 TiB (32 x 32 GB), divided by eight devices.
DDR_BYTES = 128 * 1024**3
DEVICES_A_SERVER = ASCEND_910B.ranks_per_host
# In both directions. TorchRec's own figure for CUDA (NVLink, 600 GB/s) is also a sum over links and directions.
HCCS_BANDWIDTH = 2 * ASCEND_910B.link_bandwidth
PRIVATE = "privateuseone"
"""What torch calls the device type ``npu`` until torch_npu renames it."""


class NpuTopology(Topology):
    """A pod of equal NPU servers, for ``recfx.plan``, made by :func:`npu_topology`.

    TorchRec knows no NPU, and takes the devices for ones of type ``cuda``. Bandwidths are in bytes per millisecond.
    """


def npu_topology(
    world_size: int,
    local_world_size: int = DEVICES_A_SERVER,
    *,
    hbm_cap: int = HBM_BYTES,
    ddr_cap: int = DDR_BYTES,
    hbm_bandwidth: float = ASCEND_910B.memory_bandwidth,
    ddr_bandwidth: float = ASCEND_910B.host_memory_bandwidth,
    intra_host_bandwidth: float = HCCS_BANDWIDTH,
    inter_host_bandwidth: float = ASCEND_910B.network_bandwidth,
) -> NpuTopology:
    """A pod of ``world_size`` NPUs; if a server has more than that, they are all in one server. The defaults describe
    Atlas 800T A2 servers.

    Example:
        >>> from recfx.planner.topology import npu_topology
        >>> topology = npu_topology(16, hbm_cap=32 * 1024**3)  # two servers
        >>> topology.local_world_size
        8

    Args:
        world_size, local_world_size: the number of devices, in all and per server.
        hbm_cap, ddr_cap: bytes of device and of host memory per device; the indexes of hashed tables are on the host.
        hbm_bandwidth, ddr_bandwidth: those of these memories, in bytes per second per device.
        intra_host_bandwidth, inter_host_bandwidth: bytes per second per device within a server and between servers.

    Raises:
        ConversionError: ``invalid_topology``.
    """
    for name, value in dict(locals()).items():
        _check_number(name, value)
    local_world_size = min(world_size, local_world_size)
    if world_size % local_world_size:
        raise _invalid(
            f"{world_size} devices are not a whole number of servers with {local_world_size} each.",
            f"pass at most {local_world_size} devices, or a multiple of that; or another local_world_size.",
        )
    return topology_of_settings(
        "npu",
        world_size,
        local_world_size=local_world_size,
        hbm_cap=hbm_cap,
        ddr_cap=ddr_cap,
        hbm_mem_bw=hbm_bandwidth / 1000,  # per millisecond
        ddr_mem_bw=ddr_bandwidth / 1000,
        intra_host_bw=intra_host_bandwidth / 1000,
        inter_host_bw=inter_host_bandwidth / 1000,
    )


def topology_of_settings(device: str, world_size: Any, **settings: Any) -> Topology:
    """The topology of so many ranks of which :func:`settings_of` says this."""
    if device == "npu":
        return NpuTopology(world_size=world_size, compute_device="cuda", **BY_FACTORY, **settings)
    return make_topology(world_size=world_size, compute_device=device, **settings)


def on_npus(plan: ShardingPlan, local_world_size: int = MOST_RANKS) -> ShardingPlan:
    """Move the shards of ``plan``, in place, from ``rank:9/cuda:1`` or ``rank:9/cpu`` to ``rank:9/npu:1``."""
    device = PRIVATE if torch._C._get_privateuse1_backend_name() == PRIVATE else "npu"
    per_module: dict[str, Any] = plan.plan
    for parameter in (parameter for tables in per_module.values() for parameter in tables.values()):
        for shard in getattr(parameter.sharding_spec, "shards", ()):  # or it is data parallel
            rank = rank_of(shard)
            assert rank is not None, shard
            shard.placement = _remote(f"rank:{rank}/{device}:{rank % local_world_size}")
    return plan


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


def check_topology(topology: Topology) -> Topology:
    """Refuse a topology without ranks or with memory that is no number (``invalid_topology``)."""
    _check_number("world_size", topology.world_size)
    for rank, device in enumerate(topology.devices):
        if not all(map(math.isfinite, astuple(device.storage))):
            raise _invalid(f"rank {rank} has {device.storage} bytes of memory.", "pass finite numbers of bytes.")
    return topology


def hardware_of(topology: Topology | Hardware) -> Hardware:
    """The bandwidths of a topology; what it does not say is taken from an Ascend 910B, an H100 or a host."""
    if isinstance(topology, Hardware):
        return topology
    # TorchRec's defaults are those of no device in particular: a topology that has them says nothing.
    said: dict[str, Any] = {
        constant: getattr(topology, name) * 1000
        for name, (default, constant) in _BANDWIDTHS.items()
        if getattr(topology, name) != default
    }
    device, ranks = device_of(topology), topology.local_world_size
    if "link_bandwidth" in said:
        said["link_bandwidth"] /= 2 if device == "npu" else 1  # a topology counts both directions
    if device == "cpu":
        of_memory = said.get("host_memory_bandwidth", CPU_HOST.memory_bandwidth)
        said |= {"memory_bandwidth": of_memory, "copy_bandwidth": CPU_HOST.copy_bandwidth}
        return replace(CPU_HOST, ranks_per_host=ranks, **said)
    base = ASCEND_910B if device == "npu" else replace(H100, name="CUDA device" if said else H100.name)
    if "memory_bandwidth" in said:
        said["random_access"] = 64 / said["memory_bandwidth"]
    return replace(base, ranks_per_host=ranks, **said)


def plain_topology(world_size: int, device: str) -> Topology:
    """``world_size`` devices of a type, where nothing else is known of them."""
    return npu_topology(world_size) if device in ("npu", PRIVATE) else make_topology(world_size, device)


def device_of(topology: Topology | Hardware) -> str:
    """The type of device that has the tables; ``""`` for hardware that is no type."""
    if isinstance(topology, Hardware):
        return topology.device
    return "npu" if isinstance(topology, NpuTopology) else str(topology.compute_device)


def device_of_tables(model: nn.Module) -> str:
    """The type of device that has the parameters of a model; ``"cpu"`` if none has data yet."""
    device = next((parameter.device.type for parameter in model.parameters() if not parameter.is_meta), "cpu")
    return "npu" if device == PRIVATE else device


def of_ranks(topology: Topology, world_size: int) -> Topology:
    """Describe the same devices and links for other ranks; if there are fewer than a host has, they are on one host."""
    settings = settings_of(topology) | {"local_world_size": min(world_size, topology.local_world_size)}
    return topology_of_settings(world_size=world_size, **settings)


def settings_of(topology: Topology) -> dict[str, Any]:
    """What a topology says of every rank, as plain data."""
    storage = topology.devices[0].storage
    return {
        "device": device_of(topology),
        "local_world_size": topology.local_world_size,
        "hbm_cap": storage.hbm,
        "ddr_cap": storage.ddr,
        **{name: getattr(topology, name) for name in _BANDWIDTHS},
        "bwd_compute_multiplier": topology.bwd_compute_multiplier,
    }


def _check_number(name: str, value: Any) -> None:
    """Refuse what is no finite number above 0, and numbers of ranks that are not whole."""
    whole = name in ("world_size", "local_world_size")
    is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf or (whole and value > MOST_RANKS):
        above = f" and not above {MOST_RANKS:,}" if whole else ""
        raise _invalid(f"{name} is {value!r}.", f"pass a {'whole' if whole else 'finite'} number above 0{above}.")


def _invalid(message: str, what_to_do: str) -> ConversionError:
    return ConversionError(message, reason="invalid_topology", what_to_do=what_to_do)
