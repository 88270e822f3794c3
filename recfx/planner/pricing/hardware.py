"""Hardware as the prediction of times sees it: a few constants per device, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

GB = 10**9
MEMORY_BANDWIDTH = 1600 * GB
"""An Ascend 910B reads and writes 1.6 TB/s of HBM2e, by its data sheet."""

COLLECTIVES = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
"""The operations of ``recfx.ir.meta.Collective``."""


class Constant(NamedTuple):
    """One number, in SI units, and where it comes from: a data sheet, a measurement, or an assumption."""

    value: float
    source: str


ONE_COPY = Constant(0.0, "assumption: one kernel copies all ranges; only their bytes count; not measured")


@dataclass(frozen=True, repr=False)
class Hardware:
    """One kind of device, with its links to others."""

    name: str  # what it is
    memory_bandwidth: Constant  # bytes per second of the memory that holds the tables
    random_access: Constant  # seconds per read at a place that no prefetcher can guess, beyond the time for its bytes
    flops: Constant  # floating-point operations per second
    sort_per_id: Constant  # seconds per id of a fused step, which sorts the ids of a batch by row and adds up gradients
    node_overhead: Constant  # seconds per node and phase, whatever the node does
    table_overhead: Constant  # seconds per table of a lookup and phase, however few its ids are
    index_overhead: Constant  # seconds per index that a node calls, however few the ids are
    host_memory_bandwidth: Constant  # bytes per second of the memory that holds the indexes
    host_random_access: Constant  # seconds per access to an index in that memory, beyond the time for its bytes
    copy_bandwidth: Constant  # bytes per second between the host and the device
    # bytes per second that one rank sends to ranks of its own host, by operation
    link_bandwidth: Mapping[str, Constant]
    network_bandwidth: Constant  # bytes per second that one rank sends to other hosts
    collective_latency: Mapping[str, Constant]  # seconds per collective call, whatever it sends, by operation
    # seconds per range of columns and row that is copied to put columns into order, beyond the time for its bytes
    range_overhead: Constant = ONE_COPY
    ranks_per_host: int = 8  # ranks that share a host, and its ``link_bandwidth``
    device: str = ""  # torch's type of the device; ``""`` for that of the model

    @property
    def label(self) -> str:
        """Its name, and where its constants are from."""
        return f"{self.name} (constants from tables, none measured here)"

    def __repr__(self) -> str:
        return f"Hardware({self.name!r})"

    def __str__(self) -> str:
        constants: dict[str, Constant] = {}
        for name, value in vars(self).items():
            if isinstance(value, Constant):
                constants[name] = value
            elif isinstance(value, Mapping):
                constants |= {f"{name}.{operation}": constant for operation, constant in value.items()}
        lines = [f"  {name:<34} {value:10.3g}  {source}" for name, (value, source) in constants.items()]
        return "\n".join([f"{self.label}, {self.ranks_per_host} ranks per host", *lines])


def same_for_all(value: float, source: str) -> dict[str, Constant]:
    """One constant for all collective operations."""
    return dict.fromkeys(COLLECTIVES, Constant(value, source))


_SHEET_910B = "data sheet of the Atlas 800T A2, peak; not measured"
_SHEET_H100 = "NVIDIA H100 SXM5 80GB data sheet, peak; not measured"
_LINE = "assumption: a read is at least one line of 64 bytes at the memory's bandwidth; not measured"
_LAUNCH = "assumption: one launch of a kernel; not measured"
_ONE_KERNEL = "assumption: one kernel serves all tables of a lookup"
_INDEX_CALL = "assumption: one call of an index on a host; not measured"
_CALL = "assumption: one collective call on a quiet network; not measured"
_SORT = "assumption: four passes that read and write 16 bytes per id; not measured"
_HOST_LATENCY = "assumption: 100 ns per miss of a host's cache, ten of which overlap; not measured"

ASCEND_910B = Hardware(
    name="Ascend 910B",
    memory_bandwidth=Constant(MEMORY_BANDWIDTH, _SHEET_910B + ": HBM2e"),
    random_access=Constant(64 / MEMORY_BANDWIDTH, _LINE),
    flops=Constant(75e12, "published specification tables of the 910B: FP32; not measured"),
    sort_per_id=Constant(128 / MEMORY_BANDWIDTH, _SORT),
    node_overhead=Constant(10e-6, _LAUNCH),
    table_overhead=Constant(0.0, _ONE_KERNEL),
    index_overhead=Constant(10e-6, _INDEX_CALL),
    host_memory_bandwidth=Constant(
        4 * 8 * 25.6 * GB / 8, "four Kunpeng 920 with eight channels of DDR4-3200 each, divided by eight devices"
    ),
    host_random_access=Constant(10e-9, _HOST_LATENCY),
    copy_bandwidth=Constant(32 * GB, "PCIe 4.0 x16, one direction, peak; not measured"),
    link_bandwidth=same_for_all(392 * GB / 2, _SHEET_910B + ": seven HCCS links of 56 GB/s in both directions"),
    network_bandwidth=Constant(25 * GB, _SHEET_910B + ": one 200 Gbit/s RoCE port per device"),
    collective_latency=same_for_all(30e-6, _CALL),
    device="npu",
)

H100 = Hardware(
    name="H100",
    memory_bandwidth=Constant(3350 * GB, _SHEET_H100 + ": HBM3"),
    random_access=Constant(64 / (3350 * GB), _LINE),
    flops=Constant(67e12, _SHEET_H100 + ": FP32"),
    sort_per_id=Constant(128 / (3350 * GB), _SORT),
    node_overhead=Constant(5e-6, _LAUNCH),
    table_overhead=Constant(0.0, _ONE_KERNEL),
    index_overhead=Constant(10e-6, _INDEX_CALL),
    host_memory_bandwidth=Constant(
        2 * 8 * 38.4 * GB / 8, "two sockets with eight channels of DDR5-4800 each, divided by eight devices"
    ),
    host_random_access=Constant(10e-9, _HOST_LATENCY),
    copy_bandwidth=Constant(64 * GB, _SHEET_H100 + ": PCIe 5.0 x16, one direction"),
    link_bandwidth=same_for_all(450 * GB, _SHEET_H100 + ": NVLink, one direction"),
    network_bandwidth=Constant(50 * GB, "DGX H100 data sheet: one 400 Gbit/s port per device; not measured"),
    collective_latency=same_for_all(20e-6, _CALL),
    device="cuda",
)

_HOST = "assumption: a few threads of a server; not measured"

CPU_HOST = Hardware(
    name="CPU",
    memory_bandwidth=Constant(20 * GB, _HOST),
    random_access=Constant(10e-9, _HOST_LATENCY),
    flops=Constant(1e11, _HOST),
    sort_per_id=Constant(20e-9, _HOST),
    node_overhead=Constant(20e-6, _HOST),
    table_overhead=Constant(2e-6, _HOST),
    index_overhead=Constant(10e-6, _INDEX_CALL),
    range_overhead=Constant(20e-9, _HOST),
    host_memory_bandwidth=Constant(20 * GB, _HOST),
    host_random_access=Constant(10e-9, _HOST_LATENCY),
    copy_bandwidth=Constant(20 * GB, _HOST),
    # gloo has no reduce-scatter of its own: it sums everything everywhere.
    link_bandwidth={
        **same_for_all(1 * GB, "assumption: gloo over TCP; not measured"),
        "reduce_scatter": Constant(0.5 * GB, "assumption: gloo over TCP, as a sum on all ranks; not measured"),
    },
    network_bandwidth=Constant(1.25 * GB, "assumption: a network of 10 Gbit/s; not measured"),
    collective_latency=same_for_all(200e-6, "assumption: gloo over TCP; not measured"),
    device="cpu",
)

TYPICAL: Mapping[str, Hardware] = {"cpu": CPU_HOST, "cuda": H100, "npu": ASCEND_910B}
"""What times are predicted for unless something else is given, by the type of device that has the tables. Nothing is
measured, so that equal models have equal prices."""

HardwareName: TypeAlias = Literal["ascend_910b", "h100", "cpu"]
NAMED: Mapping[str, Hardware] = {"ascend_910b": ASCEND_910B, "h100": H100, "cpu": CPU_HOST}
"""The hardware of this module by the names that the command line takes."""
