"""``table_column_wise``: the columns of a table are cut over the ranks of one host."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.sharding.types._by_columns import CutByColumns


@dataclass(frozen=True)
class TableColumnWise(CutByColumns):
    """As ``column_wise``: which ranks make a host matters to the planner that chose them, and to nothing here."""

    name = "table_column_wise"
