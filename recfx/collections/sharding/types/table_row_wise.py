"""``table_row_wise``: the rows of a table are cut over the ranks of one host."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.collections.sharding.types._by_rows import back_from_hosts, cut_rows
from recfx.ir.sharding_type import Cut, ShardingType, TablePlan


@dataclass(frozen=True)
class TableRowWise(ShardingType):
    """The ranks of the host first add up their sums, and then send them to the other hosts."""

    name = "table_row_wise"
    cuts_rows = True

    def cut(self, plan: TablePlan) -> Cut:
        """One piece of the rows per rank of the host."""
        shards, planned = cut_rows(plan)
        return Cut(shards, back_from_hosts(plan, shards), planned)
