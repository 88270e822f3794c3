"""``table_wise``: a table is on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec.distributed.types import EnumerableShardingSpec

from recfx.collections.sharding.types._by_columns import CutByColumns
from recfx.collections.sharding.types._planned import check_rank
from recfx.ir.shard import Shard
from recfx.ir.sharding_type import Cut, TablePlan
from recfx.ir.ways_back import AllToAllBack


@dataclass(frozen=True)
class TableWise(CutByColumns):
    """One shard. A plan may name only its rank."""

    name = "table_wise"

    def cut(self, plan: TablePlan) -> Cut:
        """As the sharding spec says, or else the rank."""
        ranks = plan.parameter.ranks
        if (
            isinstance(plan.parameter.sharding_spec, EnumerableShardingSpec)
            or not isinstance(ranks, (list, tuple))
            or len(ranks) != 1
        ):
            return super().cut(plan)
        check_rank(plan, ranks[0])
        rows, columns = (0, plan.table.num_embeddings), (0, plan.table.embedding_dim)
        return Cut([Shard(plan.table, ranks[0], rows, columns)], AllToAllBack())
