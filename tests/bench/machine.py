"""The constants of the machine that this runs on, measured by all ranks of a group in a second or two.

The constants of lookups, indexes and fused steps are what is left of a measured time when all that is known already is
taken away from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torchrec import KeyedJaggedTensor

from recfx.collections.pooled import HashEmbeddingBagCollection, HashEmbeddingBagConfig
from recfx.hashing import HashConfig
from recfx.ir.meta import node_meta
from recfx.kernels.build.huge_pages import without_message
from recfx.optim.attached import run_in_backward
from recfx.optim.rules import rule_of_class
from recfx.planner.pricing.formulas import formula_of
from recfx.planner.pricing.hardware import COLLECTIVES, GB, MEASURED_HERE, Constant, Hardware
from recfx.planner.pricing.node_facts import NodeFacts, Symbols, TableLoad
from recfx.planner.pricing.times import seconds_of_work
from recfx.planner.pricing.work import Work
from recfx.runtime.training_checks import on_a_copy

_REPEATS, _MOST_TIMES, _ALIKE = 20, 100, 5
_RANGES, _RANGE_ROWS = 32, 1024
_STREAM_BYTES = 64 * 2**20
_SMALL, _LARGE = 2**12, 2**22  # bytes that a rank passes to a collective

_TABLES, _ROWS, _FLOATS = 8, 2**17, 32  # 128 MiB in all
_SMALL_ROWS, _SMALL_FLOATS = 2**16, 16  # rows that caches hold, so that sorting is most of a step
_FEW, _MANY, _SORTED = 16, 2**12, 2**15  # ids per table
_LENGTH = 4
_FAR_APART = 2_654_435_761
_OF_TABLES = f"{_TABLES} tables of {_ROWS * _FLOATS * 4 // 2**20} MiB"

Speed = Callable[[int], tuple[float, float]]
"""Measures a collective to which a rank passes so many bytes: the shortest time of a call, and the processor's time
that a rank needs."""


def machine_of(group: dist.ProcessGroup) -> Hardware:
    """The host and the collectives of a gloo group, all of whose ranks call this, and get the constants of rank 0.

    All ranks measure at the same time, because they will share the host's memory and caches when they train.
    """
    ranks = group.size()
    links = {operation: _link(operation, ranks, _speed_of_group(group, operation)) for operation in COLLECTIVES}
    measured = _measure(links, f"gloo, {ranks} processes")
    of_ranks: list[Hardware] = [measured]
    dist.broadcast_object_list(of_ranks, dist.get_global_rank(group, 0), group=group)
    return of_ranks[0]


def _measure(links: Mapping[str, tuple[float, float]], over: str) -> Hardware:
    stream = Constant(_memory(), MEASURED_HERE + "a copy of 64 MiB, bytes read and written")
    gloo, later = MEASURED_HERE + over, Constant(0.0, "")
    hardware = Hardware(
        name=f"this machine, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}",
        memory_bandwidth=stream,
        random_access=later,
        flops=Constant(_flops(), MEASURED_HERE + "a product of two matrices in float32"),
        sort_per_id=later,
        node_overhead=Constant(_overhead(), MEASURED_HERE + "ten calls of a small operator of torch"),
        table_overhead=later,
        index_overhead=later,
        range_overhead=Constant(_ranges(), MEASURED_HERE + f"{_RANGES} ranges of columns put into another order"),
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
    return _with_nodes(hardware)


# Plain operations


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
    return _seconds(lambda: [small.add(1) for _ in range(10)])


# Collectives


def _link(operation: str, ranks: int, speed: Speed) -> tuple[float, float]:
    """The latency of a collective, and the bytes per second that a rank sends to others.

    The second is taken from the time of the processor, which ranks of one host spend on copies: other processes do not
    change it.
    """
    (latency, small), (_, large) = speed(_SMALL), speed(_LARGE)
    passed = (_LARGE - _SMALL) * (ranks - 1)
    times = {"all_gather": ranks, "all_reduce": 2}.get(operation, 1)  # as seconds_of_collective has it
    return latency, times * passed / ranks / max(large - small, 1e-6)


def _speed_of_group(group: dist.ProcessGroup, operation: str) -> Speed:
    return lambda size: _timed(_call(group, operation, size, group.size()), size)


def _timed(call: Callable[[], object], size: int) -> tuple[float, float]:
    """The shortest time of a call to which a rank passes so many bytes, and the processor's time of this process per
    call.
    """
    repeats = _REPEATS if size > _SMALL else 4 * _REPEATS
    call()
    begin = time.process_time()
    shortest = _seconds(call, repeats)
    return shortest, (time.process_time() - begin) / (repeats + 1)


def _call(group: Any, operation: str, size: int, ranks: int) -> Callable[[], object]:
    """A call to which every rank passes about ``size`` bytes."""
    part = torch.ones(size // 4 // ranks)
    passed = part.repeat(ranks)
    received = torch.empty_like(passed)
    if operation == "all_to_all":
        return lambda: group.alltoall_base(received, passed, [], []).wait()
    if operation == "all_gather":
        gathered = torch.empty(ranks * passed.numel())
        return lambda: group._allgather_base(gathered, passed).wait()
    if operation == "all_reduce":
        return lambda: group.allreduce([passed]).wait()
    return lambda: group._reduce_scatter_base(part, passed).wait()


# Nodes


def _with_nodes(known: Hardware) -> Hardware:
    """``known`` with the constants of rows, tables, indexes and steps."""
    static = _Measured(HashConfig(dense_rows=_ROWS), "lookup")
    known = _solved(known, "table_overhead", static, _FEW, f"a lookup of {_FEW} ids in each of {_OF_TABLES}")
    known = _solved(known, "random_access", static, _MANY, f"a lookup of {_MANY} ids in each of {_OF_TABLES}")
    small = _Measured(HashConfig(dense_rows=_SMALL_ROWS), "lookup", _SMALL_ROWS, _SMALL_FLOATS)
    sort = f"the backward of {_SORTED} ids in each of {_TABLES} small tables"
    known = _solved(known, "sort_per_id", small, _SORTED, sort, backward=True)
    hashed = _Measured(HashConfig.raw_ids(), "hash_lookup")
    with on_a_copy():  # ranks may not train indexes of their own, but these are gone afterwards
        known = _solved(known, "index_overhead", hashed, _FEW, f"the same with indexes, {_FEW} ids")
        return _solved(known, "host_random_access", hashed, _MANY, f"the same with indexes, {_MANY} ids")


_UNITS = {
    "table_overhead": "tables",
    "random_access": "random_accesses",
    "sort_per_id": "sorted_ids",
    "index_overhead": "indexes",
    "host_random_access": "index_accesses",
}
"""Which field of :class:`recfx.planner.pricing.work.Work` each constant is multiplied with."""


class _Measured:
    """A collection of tables without an index, or with one that knows half as many ids as there are rows, of which one
    kind of node is measured.
    """

    def __init__(self, hashing: HashConfig, kind: str, rows: int = _ROWS, floats: int = _FLOATS) -> None:
        self.rows, self.floats = rows, floats
        self.names, self.kind = [str(number) for number in range(_TABLES)], kind
        tables = [
            HashEmbeddingBagConfig(
                num_embeddings=rows, embedding_dim=floats, name=f"t{name}", feature_names=[name], hashing=hashing
            )
            for name in self.names
        ]
        self.collection = HashEmbeddingBagCollection(tables, device="cpu")
        for name in self.names:
            run_in_backward(torch.optim.SGD, self.collection.weight(f"t{name}"), {"lr": 0.1})
        self.collection.fused_optimizers()  # makes the graph for the optimizers
        self.is_hashed = hashing.dense_rows == 0
        self.generator = torch.Generator().manual_seed(0)
        for table in self.collection.tables_with_index():
            self.collection.index(table).find_or_insert(torch.arange(rows // 2) * _FAR_APART)

    @without_message()
    def seconds(self, ids: int, backward: bool = False) -> float:
        """The shortest time of the node, or of its backward, with so many ids of each table.

        Other processes disturb some of the calls, so it is taken when a few were about as short, or after many.
        """
        before, node = self._nodes()
        times = []
        for _ in range(_MOST_TIMES):
            value: Any = self._batch(ids)
            for module in before:
                value = module(value)
            begin = time.perf_counter()
            value = node(value)
            if backward:
                gradient = torch.ones_like(value)
                begin = time.perf_counter()
                value.backward(gradient)
            times.append(time.perf_counter() - begin)
            shortest = min(times)
            if len(times) > 2 * _ALIKE and sum(seconds < 1.1 * shortest for seconds in times) >= _ALIKE:
                break
        return shortest

    def work(self, ids: int, backward: bool) -> Work:
        rule = rule_of_class(torch.optim.SGD)
        bags = ids // _LENGTH
        symbols = Symbols(bags, 1, lambda _: _LENGTH, float)
        loads = tuple(
            TableLoad.of(table, self.rows, 4 * self.floats, rule, True, symbols) for table in self.collection.tables
        )
        facts = NodeFacts(self.kind, loads, ids=ids * _TABLES, bags=ids * _TABLES // _LENGTH)
        phases = formula_of(self.kind)(facts)
        return phases.backward if backward else phases.forward

    def _nodes(self) -> tuple[list[nn.Module], nn.Module]:
        """The modules before the one that is measured, and this one."""
        graph_module: fx.GraphModule = self.collection.graph_module
        metas = [(node, node_meta(node)) for node in graph_module.graph.nodes]
        nodes = [(graph_module.get_submodule(str(node.target)), meta.kind) for node, meta in metas if meta is not None]
        place = [kind for _, kind in nodes].index(self.kind)
        return [module for module, _ in nodes[:place]], nodes[place][0]

    def _batch(self, ids: int) -> KeyedJaggedTensor:
        """Other ids each time, or they would be in the cache."""
        values = torch.randint(0, self.rows // (2 if self.is_hashed else 1), (_TABLES * ids,), generator=self.generator)
        lengths = torch.full((_TABLES * ids // _LENGTH,), _LENGTH)
        return KeyedJaggedTensor(self.names, values * _FAR_APART if self.is_hashed else values, lengths=lengths)


def _solved(
    known: Hardware, constant: str, measured: _Measured, ids: int, how: str, *, backward: bool = False
) -> Hardware:
    """``known`` with one more constant: what a measured time has beyond what is explained already."""
    work = measured.work(ids, backward)
    rest = measured.seconds(ids, backward) - seconds_of_work(work, known)
    units = getattr(work, _UNITS[constant])
    solved: dict[str, Any] = {constant: Constant(max(rest / units, 1e-10), MEASURED_HERE + how)}
    return replace(known, **solved)
