"""The facts by which kernels are chosen, as data: tables, optimizers and devices need not exist."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import torch

from recfx.ir.tables import TableSpec


@dataclass(frozen=True)
class OptimizerFacts:
    """The fused optimizer of a table.

    Args:
        rule: the name of its rule.
        group: its settings, sorted by name, without the learning rate, which may change from step to step.
    """

    rule: str
    group: tuple[tuple[str, Hashable], ...] = ()


@dataclass(frozen=True)
class FrozenIndex:
    """What is known of a table's index that no longer changes; its policy is in the table's ``TableSpec.hashing``.

    Args:
        slots: the number of slots of its slot table, see ``recfx/kernels/index/slot_table.py``.
        side_row: the row of id -1, which slots cannot hold; -1 if it has none.
        longest_probe: the most slots that finding one of its ids reads; 0 if nobody has counted.
    """

    slots: int
    side_row: int
    longest_probe: int = 0


@dataclass(frozen=True)
class TableFacts:
    """A table, or a shard of one.

    Args:
        rows: how many it has.
        embedding_dim: the number of columns.
        dtype: the dtype of its rows.
        device: the type of its device.
        is_contiguous: whether its rows lie one after the other in memory, and not as a view that negates them.
        optimizer: the fused optimizer; None if the gradient goes to ``weight.grad``.
        is_trained: whether the backward reaches it.
        index: its frozen index, in a file; None in a model, and for a table without an index.
    """

    rows: int
    embedding_dim: int
    dtype: torch.dtype
    device: str
    is_contiguous: bool = True
    optimizer: OptimizerFacts | None = None
    is_trained: bool = True
    index: FrozenIndex | None = None


@dataclass(frozen=True)
class LookupFacts:
    """A lookup, as data.

    Args:
        tables: the descriptions of the tables, in column order.
        combine: ``"SUM"``, ``"MEAN"`` or ``"NONE"``: what becomes of the rows of a bag.
        is_weighted: whether per-sample weights multiply the rows.
        facts: what else is known about each table.
    """

    tables: tuple[TableSpec, ...]
    combine: str
    is_weighted: bool
    facts: tuple[TableFacts, ...]

    @cached_property
    def device_types(self) -> frozenset[str]:
        return frozenset(table.device for table in self.facts)

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        return frozenset(table.dtype for table in self.facts)

    @property
    def is_contiguous(self) -> bool:
        return all(table.is_contiguous for table in self.facts)

    @cached_property
    def optimizers(self) -> tuple[OptimizerFacts, ...]:
        """The tables' fused optimizers, equal ones once; empty if there are none."""
        return tuple(dict.fromkeys(table.optimizer for table in self.facts if table.optimizer is not None))
