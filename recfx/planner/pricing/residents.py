"""Bytes that stay in memory between steps, counted once however many nodes share them."""

from __future__ import annotations

import functools
import math

from torch import nn

from recfx.hashing import HashIndex, ResolvedHashConfig
from recfx.ir.context import TableFacts
from recfx.ir.tables import TableSpec
from recfx.optim.rules import rule_named
from recfx.optim.rules.rule import Rule
from recfx.planner.pricing.work import NO_RESIDENT, Resident
from recfx.runtime import TableStore

_STEP_BYTES = 4  # the number of steps is one float32


class Residents:
    """Counts what tables keep, as their facts tell it; tensors that are here, in a store, are counted once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def of_table(self, table: TableSpec, facts: TableFacts, store: TableStore | None) -> Resident:
        if store is not None and not self._is_new(store.weight(table.name)):
            return NO_RESIDENT
        return _table(table, facts)

    def of_index(self, table: TableSpec, store: TableStore | None) -> Resident:
        if store is None or table.name not in store.indexes:
            return Resident(index=_index(table))
        buffers = store.index(table.name).buffers()  # one that was loaded may keep more than a new one
        return Resident(index=sum(buffer.nbytes for buffer in buffers if self._is_new(buffer)))

    def of_dense(self, module: nn.Module) -> Resident:
        """The parameters and buffers of ``module`` that were not counted yet."""
        tensors = [*module.parameters(), *module.buffers()]
        return Resident(weights=sum(tensor.nbytes for tensor in tensors if self._is_new(tensor)))

    def _is_new(self, counted: object) -> bool:
        is_new = id(counted) not in self._seen
        self._seen.add(id(counted))
        return is_new


def rule_of(facts: TableFacts) -> Rule | None:
    """The rule of a table's fused optimizer, if it has one."""
    return None if facts.optimizer is None else rule_named(facts.optimizer.rule)


def resident_of(table: TableSpec, facts: TableFacts) -> Resident:
    """What a table, or a shard of one, would keep."""
    return _table(table, facts) + Resident(index=_index(table))


def _table(table: TableSpec, facts: TableFacts) -> Resident:
    """The optimizer's state is as it is after the first step."""
    rows, columns, state, rule = table.num_embeddings, table.embedding_dim, 0, rule_of(facts)
    if rule is not None:
        tensors = sum(4 * math.prod(tensor.shape(rows, columns)) for tensor in rule.states)
        state = tensors + (_STEP_BYTES if rule.counts_steps else 0)
    return Resident(weights=rows * columns * facts.dtype.itemsize, optimizer=state)


def _index(table: TableSpec) -> int:
    config, first = table.hashing, table.first_row
    if config is None or not table.has_index:
        return 0
    return _index_bytes(config, first, first + table.num_embeddings)


@functools.lru_cache(maxsize=4096)
def _index_bytes(config: ResolvedHashConfig, first_row: int, end_row: int) -> int:
    index = HashIndex(config.rows, config=config, device="meta", row_begin=first_row, row_end=end_row)
    return sum(buffer.nbytes for buffer in index.buffers())
