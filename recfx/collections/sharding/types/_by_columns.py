"""What the types that leave rows uncut have in common."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.collections.sharding.types._planned import column_blocks, planned_shards, row_borders, wrong
from recfx.ir.shard import Shard
from recfx.ir.sharding_type import Cut, ShardingType, TablePlan
from recfx.ir.ways_back import AllToAllBack


@dataclass(frozen=True)
class CutByColumns(ShardingType):
    """Each block of columns is on one rank; the columns of all ranks come back in one all-to-all."""

    def cut(self, plan: TablePlan) -> Cut:
        """One shard per column block."""
        shards = []
        for columns, pieces in column_blocks(plan, planned_shards(plan)):
            if len(pieces) > 1 or pieces[0].rows[0] != 0:
                raise wrong(plan, "plan_invalid", "cuts rows, which this type does not do.")
            if not plan.table.has_index:
                row_borders(plan, pieces)
            shards.append(Shard(plan.table, pieces[0].rank, (0, plan.table.num_embeddings), columns))
        return Cut(shards, AllToAllBack())
