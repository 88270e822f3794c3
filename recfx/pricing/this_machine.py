"""The constants of the machine that this runs on, measured in a second or two, once per process."""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from recfx.pricing.hardware import GB, Constant, Hardware

_REPEATS = 5
_STREAM_BYTES = 64 * 2**20
_TABLE_ROWS, _ROW_FLOATS, _IDS = 2**20, 16, 2**16  # a table of 64 MiB with rows of one line of the cache
_SMALL, _LARGE = 2**12, 2**22  # bytes that a rank passes to a collective
_HOW = "measured on this machine: "


@functools.lru_cache(maxsize=1)
def this_machine() -> Hardware:
    """The host, with as many threads as torch uses now; ranks that talk over gloo are on the same host."""
    bandwidth, miss = _memory(), 0.0
    miss = _misses(bandwidth)
    links = {operation: _collective(operation) for operation in ("all_to_all", "reduce_scatter", "all_gather")}
    stream = Constant(bandwidth, _HOW + "a copy of 64 MiB, bytes read and written")
    random = Constant(miss, _HOW + "rows of 64 bytes pooled from a table of 64 MiB, beyond their bytes")
    return Hardware(
        name=f"this machine ({torch.get_num_threads()} threads)",
        memory_bandwidth=stream,
        random_access=random,
        flops=Constant(_flops(), _HOW + "a product of two matrices in float32"),
        node_overhead=Constant(_overhead(), _HOW + "a small operator of torch, times ten"),
        host_memory_bandwidth=stream,
        host_random_access=random,
        copy_bandwidth=stream,
        link_bandwidth={
            name: Constant(found[1], _HOW + "gloo, two ranks in one process, over TCP") for name, found in links.items()
        },
        network_bandwidth=Constant(1.25 * GB, "assumption: a network of 10 Gbit/s; not measured"),
        collective_latency={
            name: Constant(found[0], _HOW + "gloo, two ranks in one process, over TCP") for name, found in links.items()
        },
        ranks_per_host=8,
    )


def _seconds(function: Callable[[], object]) -> float:
    """The median of a few runs, after one that is not timed."""
    function()
    times = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _memory() -> float:
    source = torch.ones(_STREAM_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _STREAM_BYTES / _seconds(lambda: target.copy_(source))


def _misses(bandwidth: float) -> float:
    table = torch.ones(_TABLE_ROWS, _ROW_FLOATS)
    ids = torch.randint(0, _TABLE_ROWS, (_IDS,), generator=torch.Generator().manual_seed(0))
    offsets = torch.arange(0, _IDS + 1, 8)
    pooled = _seconds(
        lambda: torch.nn.functional.embedding_bag(ids, table, offsets, mode="sum", include_last_offset=True)
    )
    return max(pooled / _IDS - (4 * _ROW_FLOATS + 8) / bandwidth, 1e-10)


def _flops() -> float:
    left = torch.ones(512, 512)
    return 2 * 512**3 / _seconds(lambda: left @ left)


def _overhead() -> float:
    small = torch.ones(8)

    def ten() -> None:
        for _ in range(10):
            small.add(1)

    return _seconds(ten)


def _collective(operation: str) -> tuple[float, float]:
    """The latency of a collective of two ranks, and the bytes per second that a rank sends to the other."""
    small, large = (_seconds_of_two_ranks(operation, size) for size in (_SMALL, _LARGE))
    sent = (_LARGE - _SMALL) / (1 if operation == "all_gather" else 2)
    return small, sent / max(large - small, 1e-6)


def _seconds_of_two_ranks(operation: str, size: int) -> float:
    """Both ranks are threads of this process, which need no names of a network and no other processes."""
    store = torch._C._distributed_c10d.HashStore()
    found: dict[int, float] = {}

    def rank(number: int) -> None:
        group = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=30))
        found[number] = _seconds(_call(group, operation, size))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(found.values())


def _call(group: Any, operation: str, size: int) -> Callable[[], object]:
    given = torch.ones(size // 4)
    if operation == "all_to_all":
        taken = torch.empty_like(given)
        return lambda: group.alltoall_base(taken, given, [], []).wait()
    if operation == "all_gather":
        gathered = [torch.empty_like(given) for _ in range(2)]
        return lambda: group.allgather([gathered], [given]).wait()
    part = torch.empty(size // 8)
    return lambda: group._reduce_scatter_base(part, given).wait()
