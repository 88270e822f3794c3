"""The constants of the machine that this runs on, measured in a second or two, once per process."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from recfx.planner.pricing.hardware import COLLECTIVES, GB, Constant, Hardware
from recfx.planner.pricing.measured_nodes import HOW, LookupsOfThisRank, with_nodes

_REPEATS = 20
_RANGES, _RANGE_ROWS = 32, 1024
_STREAM_BYTES = 64 * 2**20
_SMALL, _LARGE = 2**12, 2**22  # bytes that a rank passes to a collective


@functools.lru_cache(maxsize=1)
def this_machine() -> Hardware:
    """The host, with as many threads as torch uses now; ranks that talk over gloo are on the same host.

    Collectives are those of two threads of this process, which need no other processes.
    """
    return _measure(*_of_two_threads())


def machine_of(group: dist.ProcessGroup) -> Hardware:
    """The host and the collectives of a gloo group, all of whose ranks call this, and get the constants of rank 0.

    All ranks measure at the same time, because they will share the host's memory and caches when they train.
    """
    links = {operation: _collective(_SpeedOfGroup(group, operation)) for operation in COLLECTIVES}
    how = f"gloo, {group.size()} processes"
    found: list[Hardware | None] = [replace(_measure(links, how), speed_alone=_speed_alone(group))]
    dist.broadcast_object_list(found, dist.get_global_rank(group, 0), group=group)
    (measured,) = found
    assert measured is not None
    return measured


def _speed_alone(group: dist.ProcessGroup) -> Constant:
    """How much faster the first rank is while all others wait for it."""
    lookups = LookupsOfThisRank()
    dist.barrier(group)
    together = lookups.seconds()
    dist.barrier(group)
    alone = lookups.seconds() if group.rank() == 0 else together
    dist.barrier(group)
    return Constant(max(1.0, together / alone), lookups.HOW)


def _of_two_threads() -> tuple[dict[str, tuple[float, float]], str]:
    links = {operation: _collective(_SpeedOfThreads(operation)) for operation in COLLECTIVES}
    return links, "gloo, two ranks in one process"


def _measure(links: dict[str, tuple[float, float]], over: str) -> Hardware:
    stream = Constant(_memory(), HOW + "a copy of 64 MiB, bytes read and written")
    gloo, later = HOW + over, Constant(0.0, "")
    found = Hardware(
        name=f"this machine, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}",
        memory_bandwidth=stream,
        random_access=later,
        flops=Constant(_flops(), HOW + "a product of two matrices in float32"),
        sort_per_id=later,
        node_overhead=Constant(_overhead(), HOW + "ten calls of a small operator of torch"),
        table_overhead=later,
        index_overhead=later,
        range_overhead=Constant(_ranges(), HOW + f"{_RANGES} ranges of columns put into another order"),
        host_memory_bandwidth=stream,
        host_random_access=later,
        copy_bandwidth=stream,
        link_bandwidth={name: Constant(link[1], gloo) for name, link in links.items()},
        network_bandwidth=Constant(1.25 * GB, "assumption: a network of 10 Gbit/s; not measured"),
        collective_latency={name: Constant(link[0], gloo) for name, link in links.items()},
        ranks_per_host=8,
        device="cpu",
        links_are_shared=True,
    )
    return with_nodes(found)


def _seconds(function: Callable[[], object], repeats: int = _REPEATS) -> float:
    """The shortest of a few runs, which other processes disturb least, after one that is not timed."""
    function()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def _memory() -> float:
    source = torch.ones(_STREAM_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * _STREAM_BYTES / _seconds(lambda: target.copy_(source))


def _ranges() -> float:
    """A join of columns in another order; they are so few that what is left after their bytes does not matter."""
    ranges = torch.ones(_RANGE_ROWS, 8 * _RANGES).split(8, dim=1)
    return _seconds(lambda: torch.cat(ranges[::-1], dim=1)) / _RANGE_ROWS / _RANGES


def _flops() -> float:
    left = torch.ones(512, 512)
    return 2 * 512**3 / _seconds(lambda: left @ left)


def _overhead() -> float:
    small = torch.ones(8)

    def ten() -> None:
        for _ in range(10):
            small.add(1)

    return _seconds(ten)


class _Speed(Protocol):
    """Measures one kind of collective: the shortest time of a call, and the processor's time that a rank needs."""

    operation: str
    ranks: int

    def seconds(self, size: int) -> tuple[float, float]:
        """Both, if a rank passes ``size`` bytes."""
        ...


def _collective(speed: _Speed) -> tuple[float, float]:
    """The latency of a collective, and the bytes per second that a rank sends to others.

    The second is taken from the time of the processor, which ranks of one host spend on copies: other processes do not
    change it.
    """
    (latency, small), (_, large) = speed.seconds(_SMALL), speed.seconds(_LARGE)
    passed = (_LARGE - _SMALL) * (speed.ranks - 1)
    times = {"all_gather": speed.ranks, "all_reduce": 2}.get(speed.operation, 1)  # as seconds_of_collective has it
    return latency, times * passed / speed.ranks / max(large - small, 1e-6)


class _SpeedOfGroup:
    """Measures a group; all its ranks take part."""

    def __init__(self, group: dist.ProcessGroup, operation: str) -> None:
        self.group, self.operation, self.ranks = group, operation, group.size()

    def seconds(self, size: int) -> tuple[float, float]:
        """See :class:`_Speed`."""
        repeats = _repeats(size)
        call = _call(self.group, self.operation, size, self.ranks)
        call()
        begin = time.process_time()
        shortest = _seconds(call, repeats)
        return shortest, (time.process_time() - begin) / (repeats + 1)


class _SpeedOfThreads:
    """Measures two ranks that are threads of this process."""

    ranks = 2

    def __init__(self, operation: str) -> None:
        self.operation = operation

    def seconds(self, size: int) -> tuple[float, float]:
        """See :class:`_Speed`."""
        store = torch._C._distributed_c10d.HashStore()
        waiting, repeats = threading.Barrier(2), _repeats(size)
        found: dict[int, tuple[float, float]] = {}

        def rank(number: int) -> None:
            call = _call(dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=30)), self.operation, size, 2)
            call()
            waiting.wait()
            begin = time.process_time()
            shortest = _seconds(call, repeats)
            waiting.wait()
            found[number] = shortest, (time.process_time() - begin) / (repeats + 1) / 2

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first, second = found.values()
        return max(first[0], second[0]), max(first[1], second[1])


def _repeats(size: int) -> int:
    return _REPEATS if size > _SMALL else 4 * _REPEATS


def _call(group: Any, operation: str, size: int, ranks: int) -> Callable[[], object]:
    """A call to which every rank passes about ``size`` bytes."""
    part = torch.ones(size // 4 // ranks)
    given = part.repeat(ranks)
    taken = torch.empty_like(given)
    if operation == "all_to_all":
        return lambda: group.alltoall_base(taken, given, [], []).wait()
    if operation == "all_gather":
        gathered = torch.empty(ranks * given.numel())
        return lambda: group._allgather_base(gathered, given).wait()
    if operation == "all_reduce":
        return lambda: group.allreduce([given]).wait()
    return lambda: group._reduce_scatter_base(part, given).wait()
