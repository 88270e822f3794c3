"""``row_wise``: the rows of a table are cut over all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.collections.sharding.types._by_rows import cut_rows
from recfx.ir.sharding_type import Cut, ShardingType, TablePlan
from recfx.ir.ways_back import ReduceScatterBack


@dataclass(frozen=True)
class RowWise(ShardingType):
    """Each rank sums what it has of a bag; the sums are added up on the way back."""

    name = "row_wise"
    cuts_rows = True

    def cut(self, plan: TablePlan) -> Cut:
        """One piece of the rows per rank."""
        shards, planned = cut_rows(plan)
        return Cut(shards, ReduceScatterBack(), planned)
