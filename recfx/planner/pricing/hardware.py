"""Hardware as the prediction of times sees it: a few constants per device, in SI units. None was measured here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

GB = 10**9


@dataclass(frozen=True)
class Hardware:
    """One kind of device, with its links to others."""

    name: str  # what it is
    device: str  # torch's type of the device; ``""`` for that of the model
    sources: str  # where the constants are from
    memory_bandwidth: float  # bytes per second of the memory that holds the tables
    random_access: float  # seconds per read at a place that no prefetcher can guess, beyond the time for its bytes
    flops: float  # floating-point operations per second
    sort_per_id: float  # seconds per id of a fused step, which sorts the ids of a batch by row and adds up gradients
    node_overhead: float  # seconds per node and phase, whatever the node does
    host_memory_bandwidth: float  # bytes per second of the memory that holds the indexes
    copy_bandwidth: float  # bytes per second between the host and the device
    link_bandwidth: float  # bytes per second that one rank sends to ranks of its own host
    network_bandwidth: float  # bytes per second that one rank sends to other hosts
    collective_latency: float  # seconds per collective call, whatever it sends
    # assumptions: one kernel serves all tables of a lookup, and another copies all ranges of columns
    table_overhead: float = 0.0  # seconds per table of a lookup and phase, however few its ids are
    range_overhead: float = 0.0  # seconds per range of columns and row that is copied to put columns into order
    index_overhead: float = 10e-6  # seconds per index that a node calls, however few the ids are
    # an assumption: 100 ns per miss of a host's cache, ten of which overlap
    host_random_access: float = 10e-9  # seconds per access to an index on the host, beyond the time for its bytes
    has_reduce_scatter: bool = True  # without its own one, a reduce-scatter sums everything everywhere
    ranks_per_host: int = 8  # ranks that share a host, and its ``link_bandwidth``

    @property
    def label(self) -> str:
        """Its name, and where its constants are from."""
        return f"{self.name} (constants from tables, none measured here)"

    def __str__(self) -> str:
        lines = [f"  {name:<22} {value:10.3g}" for name, value in vars(self).items() if isinstance(value, float)]
        return "\n".join([f"{self.label}, {self.ranks_per_host} ranks per host", *lines, f"from {self.sources}"])


ASCEND_910B = Hardware(
    name="Ascend 910B",
    device="npu",
    sources="peaks in the data sheet of the Atlas 800T A2, flops in published tables; latencies are assumptions",
    memory_bandwidth=1600.0 * GB,  # HBM2e
    random_access=64 / (1600 * GB),  # at least one line of 64 bytes
    flops=75e12,  # FP32
    sort_per_id=128 / (1600 * GB),  # four passes that read and write 16 bytes per id
    node_overhead=10e-6,  # one launch of a kernel
    host_memory_bandwidth=4 * 8 * 25.6 * GB / 8,  # four Kunpeng 920, eight channels of DDR4-3200 each; eight devices
    copy_bandwidth=32.0 * GB,  # PCIe 4.0 x16, one direction
    link_bandwidth=392 * GB / 2,  # seven HCCS links of 56 GB/s in both directions
    network_bandwidth=25.0 * GB,  # one 200 Gbit/s RoCE port per device
    collective_latency=30e-6,
)

H100 = Hardware(
    name="H100",
    device="cuda",
    sources="peaks in the data sheets of an H100 SXM5 80GB and a DGX H100; latencies are assumptions",
    memory_bandwidth=3350.0 * GB,  # HBM3
    random_access=64 / (3350 * GB),
    flops=67e12,  # FP32
    sort_per_id=128 / (3350 * GB),
    node_overhead=5e-6,
    host_memory_bandwidth=2 * 8 * 38.4 * GB / 8,  # two sockets, eight channels of DDR5-4800 each; eight devices
    copy_bandwidth=64.0 * GB,  # PCIe 5.0 x16, one direction
    link_bandwidth=450.0 * GB,  # NVLink, one direction
    network_bandwidth=50.0 * GB,  # one 400 Gbit/s port per device
    collective_latency=20e-6,
)

CPU_HOST = Hardware(
    name="CPU",
    device="cpu",
    sources="assumptions: a few threads of a server, gloo over TCP, a network of 10 Gbit/s",
    memory_bandwidth=20.0 * GB,
    random_access=10e-9,
    flops=1e11,
    sort_per_id=20e-9,
    node_overhead=20e-6,
    table_overhead=2e-6,
    range_overhead=20e-9,
    host_memory_bandwidth=20.0 * GB,
    copy_bandwidth=20.0 * GB,
    link_bandwidth=1.0 * GB,
    network_bandwidth=1.25 * GB,
    collective_latency=200e-6,
    has_reduce_scatter=False,
)

NAMED: Mapping[str, Hardware] = {"ascend_910b": ASCEND_910B, "h100": H100, "cpu": CPU_HOST}
"""The hardware of this module by the names that functions and the command line take."""

HardwareName: TypeAlias = Literal["ascend_910b", "h100", "cpu"]

TYPICAL: Mapping[str, Hardware] = {hardware.device: hardware for hardware in NAMED.values()}
"""What times are predicted for unless something else is given, by the type of device that has the tables."""
