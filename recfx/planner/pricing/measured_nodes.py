"""The constants of lookups, indexes and fused steps on this machine: what the nodes themselves take, beyond the rest.

Each of them is what is left of a measured time when all that is known already is taken away from it.
"""

from __future__ import annotations

import time
from dataclasses import fields, replace
from typing import Any

import torch
from torch import fx, nn
from torchrec import KeyedJaggedTensor

from recfx.collections.pooled import HashEmbeddingBagCollection, HashEmbeddingBagConfig
from recfx.hashing import HashConfig
from recfx.ir.meta import node_meta
from recfx.optim.attached import run_in_backward
from recfx.optim.rules import rule_of_class
from recfx.planner.pricing.formulas import formula_of
from recfx.planner.pricing.hardware import Constant, Hardware
from recfx.planner.pricing.node_facts import NodeFacts, TableLoad
from recfx.planner.pricing.symbols import Symbols
from recfx.planner.pricing.times import WorkAt, seconds_of_work
from recfx.planner.pricing.work import Work
from recfx.runtime.training_checks import on_a_copy

HOW = "measured on this machine: "

_TABLES, _ROWS, _FLOATS = 8, 2**17, 32  # 128 MiB in all
_SMALL_ROWS, _SMALL_FLOATS = 2**16, 16  # rows that caches hold, so that sorting is most of a step
_FEW, _MANY, _SORTED = 16, 2**12, 2**15  # ids per table
_LENGTH = 4
_MOST_TIMES, _ALIKE = 100, 5
_FAR_APART = 2_654_435_761
_OF_TABLES = f"{_TABLES} tables of {_ROWS * _FLOATS * 4 // 2**20} MiB"


def with_nodes(known: Hardware) -> Hardware:
    """``known`` with the constants of rows, tables, indexes and steps."""
    static = _Measured(HashConfig(dense_rows=_ROWS), "lookup")
    found = _solved(known, "table_overhead", static, _FEW, f"a lookup of {_FEW} ids in each of {_OF_TABLES}")
    found = _solved(found, "random_access", static, _MANY, f"a lookup of {_MANY} ids in each of {_OF_TABLES}")
    small = _Measured(HashConfig(dense_rows=_SMALL_ROWS), "lookup", _SMALL_ROWS, _SMALL_FLOATS)
    sort = f"the backward of {_SORTED} ids in each of {_TABLES} small tables"
    found = _solved(found, "sort_per_id", small, _SORTED, sort, backward=True)
    hashed = _Measured(HashConfig(dense_rows=0), "hash_lookup")
    with on_a_copy():  # ranks may not train indexes of their own, but these are gone afterwards
        found = _solved(found, "index_overhead", hashed, _FEW, f"the same with indexes, {_FEW} ids")
        return _solved(found, "host_random_access", hashed, _MANY, f"the same with indexes, {_MANY} ids")


class LookupsOfThisRank:
    """A lookup that is bound by memory, to be timed while other ranks of the host work, and while they wait."""

    HOW = f"{HOW}a lookup of {_MANY} ids in each of {_OF_TABLES}, by all ranks at once and by one while the others wait"

    def __init__(self) -> None:
        self._static = _Measured(HashConfig(dense_rows=_ROWS), "lookup")

    def seconds(self) -> float:
        """The shortest time."""
        return self._static.seconds(_MANY, backward=False)


_UNITS = {
    "table_overhead": "tables",
    "random_access": "random_accesses",
    "sort_per_id": "sorted_ids",
    "index_overhead": "indexes",
    "host_random_access": "index_accesses",
}
"""Which field of :class:`recfx.planner.pricing.work.Work` each constant is multiplied with."""


class _Measured:
    """A collection of tables without an index, or with one that knows half as many ids as there are rows.

    Args:
        hashing: of its tables.
        kind: the kind of node that is measured.
        rows: of each table.
        floats: of each row.
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

    def seconds(self, ids: int, backward: bool) -> float:
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
            if len(times) > 2 * _ALIKE and sum(each < 1.1 * shortest for each in times) >= _ALIKE:
                break
        return shortest

    def work(self, ids: int, backward: bool) -> Work:
        """What the formulas say of it."""
        rule = rule_of_class(torch.optim.SGD)
        symbols = Symbols(ids // _LENGTH, 1, lambda _: _LENGTH)
        loads = tuple(
            TableLoad.of(each, self.rows, 4 * self.floats, rule, True, symbols) for each in self.collection.tables
        )
        facts = NodeFacts(self.kind, loads, ids=ids * _TABLES, bags=ids * _TABLES // _LENGTH)
        phases = formula_of(self.kind)(facts)
        return phases.backward if backward else phases.forward

    def _nodes(self) -> tuple[list[nn.Module], nn.Module]:
        graph_module: fx.GraphModule = self.collection.graph_module
        before: list[nn.Module] = []
        for node in graph_module.graph.nodes:
            meta = node_meta(node)
            if meta is not None:
                module = graph_module.get_submodule(str(node.target))
                if meta.kind == self.kind:
                    return before, module
                before.append(module)
        raise AssertionError(f"there is no node of kind {self.kind}")

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
    explained = seconds_of_work(WorkAt(*(getattr(work, each.name) for each in fields(work))), known)
    rest = measured.seconds(ids, backward) - explained
    units = getattr(work, _UNITS[constant])
    solved: dict[str, Any] = {constant: Constant(max(rest / units, 1e-10), HOW + how)}
    return replace(known, **solved)
