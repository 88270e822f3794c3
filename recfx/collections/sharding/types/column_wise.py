"""``column_wise``: the columns of a table are cut over any ranks."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.collections.sharding.types._by_columns import CutByColumns


@dataclass(frozen=True)
class ColumnWise(CutByColumns):
    """A rank may have several blocks."""

    name = "column_wise"
