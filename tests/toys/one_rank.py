"""A toy sharding type: ``table_wise`` under another name, with a way back of its own. This file is all of it."""

from dataclasses import dataclass, replace

from recfx.ir.shards import Cut, ShardingType, TablePlan
from recfx.ir.tables import Shard
from recfx.ir.ways_back import ALL_TO_ALL

ONE_RANK_BACK = replace(ALL_TO_ALL, name="one_rank", place=10, wording="toy all-to-all")
"""As whole tables travel, in an all-to-all of its own."""


@dataclass(frozen=True)
class OneRank(ShardingType):
    """The whole table on the first rank that the plan names."""

    name = "one_rank"
    is_planned = False

    def cut(self, plan: TablePlan) -> Cut:
        """One shard."""
        (rank,) = plan.parameter.ranks or [0]
        rows, columns = (0, plan.table.num_embeddings), (0, plan.table.embedding_dim)
        return Cut([Shard(plan.table, rank, rows, columns)], ONE_RANK_BACK)
