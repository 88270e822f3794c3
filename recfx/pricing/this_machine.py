"""The constants of the machine that this runs on, measured in a second or two, once per process."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from recfx.hashing import HashConfig
from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.modules.embedding_bag_config import HashEmbeddingBagConfig
from recfx.optim.attached import run_in_backward
from recfx.optim.rules import rule_of_class
from recfx.pricing.formulas import lookup
from recfx.pricing.hardware import COLLECTIVES, GB, Constant, Hardware
from recfx.pricing.node_facts import NodeFacts, TableLoad
from recfx.pricing.symbols import Symbols
from recfx.pricing.times import WorkAt, seconds_of_work

_REPEATS = 20
_STREAM_BYTES = 64 * 2**20
_TABLE_ROWS, _ROW_FLOATS, _IDS = 2**20, 16, 2**15  # a table of 64 MiB with rows of one line of the cache
_STEP_TABLES, _STEP_ROWS = 8, 2**16
_SMALL, _LARGE = 2**12, 2**22  # bytes that a rank passes to a collective
_HOW = "measured on this machine: "


@functools.lru_cache(maxsize=1)
def this_machine() -> Hardware:
    """The host, with as many threads as torch uses now; ranks that talk over gloo are on the same host.

    Collectives are those of two threads of this process, which need no other processes.
    """
    return _measure(*_of_two_threads())


def machine_of(group: dist.ProcessGroup) -> Hardware:
    """The host, as rank 0 of a gloo group measures it, and the collectives of that group; all its ranks call this.

    Every rank gets the same constants.
    """
    links = {operation: _collective(_SpeedOfGroup(group, operation)) for operation in COLLECTIVES}
    how = f"gloo, {group.size()} processes"
    found = [_measure(links, how) if group.rank() == 0 else None]
    dist.broadcast_object_list(found, dist.get_global_rank(group, 0), group=group)
    (measured,) = found
    assert measured is not None
    return measured


def _of_two_threads() -> tuple[dict[str, tuple[float, float]], str]:
    links = {operation: _collective(_SpeedOfThreads(operation)) for operation in COLLECTIVES}
    return links, "gloo, two ranks in one process"


def _measure(links: dict[str, tuple[float, float]], over: str) -> Hardware:
    bandwidth = _memory()
    stream = Constant(bandwidth, _HOW + "a copy of 64 MiB, bytes read and written")
    random = Constant(_misses(bandwidth), _HOW + "rows of 64 bytes pooled from a table of 64 MiB, beyond their bytes")
    gloo = _HOW + over
    found = Hardware(
        name=f"this machine, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}",
        memory_bandwidth=stream,
        random_access=random,
        flops=Constant(_flops(), _HOW + "a product of two matrices in float32"),
        sort_per_id=Constant(0.0, ""),
        node_overhead=Constant(_overhead(), _HOW + "ten calls of a small operator of torch"),
        host_memory_bandwidth=stream,
        host_random_access=random,
        copy_bandwidth=stream,
        link_bandwidth={name: Constant(link[1], gloo) for name, link in links.items()},
        network_bandwidth=Constant(1.25 * GB, "assumption: a network of 10 Gbit/s; not measured"),
        collective_latency={name: Constant(link[0], gloo) for name, link in links.items()},
        ranks_per_host=8,
        device="cpu",
        links_are_shared=True,
    )
    sorting = Constant(_sorting(found), _HOW + "the backward of eight small tables, beyond what else it does")
    return replace(found, sort_per_id=sorting)


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


def _misses(bandwidth: float) -> float:
    table = torch.ones(_TABLE_ROWS, _ROW_FLOATS)
    ids = torch.randint(0, _TABLE_ROWS, (_IDS,), generator=torch.Generator().manual_seed(0))
    offsets = torch.arange(0, _IDS + 1, 8)
    pooled = _seconds(
        lambda: torch.nn.functional.embedding_bag(ids, table, offsets, mode="sum", include_last_offset=True)
    )
    return max(pooled / _IDS - (4 * _ROW_FLOATS + 8) / bandwidth, 1e-10)


def _sorting(hardware: Hardware) -> float:
    """Seconds per id of a fused step that its bytes, misses and operations do not explain."""
    names, length = [str(number) for number in range(_STEP_TABLES)], 8
    samples = _IDS // length
    tables = [
        HashEmbeddingBagConfig(
            num_embeddings=_STEP_ROWS,
            embedding_dim=_ROW_FLOATS,
            name=f"t{name}",
            feature_names=[name],
            hashing=HashConfig(dense_rows=_STEP_ROWS),
        )
        for name in names
    ]
    collection = HashEmbeddingBagCollection(tables, device="cpu")
    for name in names:
        run_in_backward(torch.optim.SGD, collection.weight(f"t{name}"), {"lr": 0.1})
    collection.fused_optimizers()  # makes the graph for the optimizers
    ids = torch.randint(0, _STEP_ROWS, (_STEP_TABLES * _IDS,), generator=torch.Generator().manual_seed(0))
    batch = KeyedJaggedTensor(names, ids, lengths=torch.full((_STEP_TABLES * samples,), length))
    gradient = torch.ones(samples, _STEP_TABLES * _ROW_FLOATS)
    pooled = [collection.graph_module(batch).values() for _ in range(_REPEATS + 1)]
    measured = _seconds(lambda: pooled.pop().backward(gradient))
    symbols = Symbols(samples, 1, lambda _: length)
    rule = rule_of_class(torch.optim.SGD)
    assert rule is not None
    loads = [TableLoad.of(table, _STEP_ROWS, 4 * _ROW_FLOATS, rule, True, symbols) for table in collection.tables]
    known = lookup(NodeFacts("lookup", tuple(loads))).backward
    explained = seconds_of_work(WorkAt(*(getattr(known, each.name) for each in fields(known))), hardware)
    return max(measured - explained, 0.0) / ids.numel()


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
    """Of a group; all its ranks measure."""

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
    """Of two ranks that are threads of this process."""

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
