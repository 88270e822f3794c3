"""A lookup as data: what targets are asked about, for tables and devices that need not be there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from recfx.ir.facts import OptimizerFacts, TableFacts
from recfx.ir.tables import TableSpec


@dataclass(frozen=True)
class LookupFacts:
    """A lookup, as data.

    Args:
        tables: the descriptions of the tables, in column order.
        combine: ``"SUM"``, ``"MEAN"`` or ``"NONE"``: what becomes of the rows of a bag.
        is_weighted: whether per-sample weights multiply the rows.
        facts: what else is known of each table.
    """

    tables: tuple[TableSpec, ...]
    combine: str
    is_weighted: bool
    facts: tuple[TableFacts, ...]

    @cached_property
    def device_types(self) -> frozenset[str]:
        """The types of the tables' devices."""
        return frozenset(table.device for table in self.facts)

    @cached_property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes of the tables."""
        return frozenset(table.dtype for table in self.facts)

    @property
    def is_contiguous(self) -> bool:
        """Whether the rows of every table lie one after the other."""
        return all(table.is_contiguous for table in self.facts)

    @cached_property
    def optimizers(self) -> tuple[OptimizerFacts, ...]:
        """The tables' fused optimizers, equal ones once; empty if there are none."""
        return tuple(dict.fromkeys(table.optimizer for table in self.facts if table.optimizer is not None))
