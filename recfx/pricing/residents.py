"""Bytes that stay in memory between steps, counted once however many nodes share them."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn

from recfx.hashing import HashIndex, ResolvedHashConfig
from recfx.nodes import TableStore
from recfx.optim.rules.rule import Rule
from recfx.pricing.work import Resident

_STEP_BYTES = 4  # the number of steps is one float32


class Residents:
    """Counts tensors, each of them once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def of_table(self, store: TableStore, table: str) -> Resident:
        """The weights and the optimizer state of a table, or of a shard."""
        if table not in store.bags:
            return Resident()
        weight, optimizer = store.weight(table), store.optimizers.get(table)
        if not self._is_new(weight):
            return Resident()
        state = 0 if optimizer is None else state_bytes(optimizer.rule, *weight.shape)
        return Resident(weights=tensor_bytes(weight), optimizer=state)

    def of_index(self, store: TableStore, table: str) -> Resident:
        """The index of a table, or of a shard."""
        if table not in store.indexes:
            return Resident()
        index = store.index(table)
        return Resident(index=sum(tensor_bytes(buffer) for buffer in index.buffers() if self._is_new(buffer)))

    def of_dense(self, module: nn.Module) -> Resident:
        """The parameters and buffers of ``module`` that were not counted yet."""
        tensors = [*module.parameters(), *module.buffers()]
        return Resident(weights=sum(tensor_bytes(tensor) for tensor in tensors if self._is_new(tensor)))

    def _is_new(self, counted: object) -> bool:
        if id(counted) in self._seen:
            return False
        self._seen.add(id(counted))
        return True


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def bytes_of_index(index: HashIndex) -> int:
    """Bytes of all tensors of an index, which may be on meta."""
    return sum(tensor_bytes(buffer) for buffer in index.buffers())


@functools.lru_cache(maxsize=4096)
def planned_index_bytes(config: ResolvedHashConfig, first_row: int, end_row: int) -> int:
    """Bytes that the index of some rows of a table would take."""
    return bytes_of_index(HashIndex(config.rows, config=config, device="meta", row_begin=first_row, row_end=end_row))


def state_bytes(rule: Rule, rows: int, dim: int) -> int:
    """Bytes of a fused optimizer's state after its first step."""
    tensors = sum(4 * math.prod(state.shape(rows, dim)) for state in rule.states)
    return tensors + (_STEP_BYTES if rule.counts_steps else 0)
