"""The types that leave rows uncut: ``table_wise``, ``column_wise`` and ``table_column_wise``."""

from __future__ import annotations

from dataclasses import dataclass

from torchrec.distributed.types import EnumerableShardingSpec

from recfx.collections.sharding.types._planned import check_rank, column_blocks, planned_shards, row_borders, wrong
from recfx.ir.shards import Cut, ShardingType, TablePlan
from recfx.ir.tables import Shard
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


@dataclass(frozen=True)
class ColumnWise(CutByColumns):
    """A rank may have several blocks."""

    name = "column_wise"


@dataclass(frozen=True)
class TableColumnWise(CutByColumns):
    """Cuts tables as ``column_wise`` does: which ranks share a host matters only to the planner that chose them."""

    name = "table_column_wise"


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
