"""``table_column_wise``: the columns of a table are cut over the ranks of one host."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.collections.sharding.types._by_columns import CutByColumns


@dataclass(frozen=True)
class TableColumnWise(CutByColumns):
    """Cuts tables as ``column_wise`` does: which ranks share a host matters only to the planner that chose them."""

    name = "table_column_wise"
