"""``data_parallel``: every rank has the whole table."""

from __future__ import annotations

from dataclasses import dataclass

from recfx.collections.sharding.types._planned import check_rank, wrong
from recfx.ir.shards import Cut, ShardingType, TablePlan
from recfx.ir.tables import Shard
from recfx.ir.ways_back import Stay


@dataclass(frozen=True)
class DataParallel(ShardingType):
    """A replica per rank. Every rank gets all ids and pools all ranks' samples, so that replicas stay equal."""

    name = "data_parallel"
    is_replicated = True
    kernels = ("dense",)  # as TorchRec's planner counts it, whatever optimizer trains the table
    unplanned_kernels = ()

    def cut(self, plan: TablePlan) -> Cut:
        """A replica on each rank; a plan that lists ranks has to list these.

        Raises:
            ConversionError: ``plan_rank``.
        """
        listed = plan.parameter.ranks
        named: list[object] = list(listed) if isinstance(listed, (list, tuple)) else []
        for rank in named:
            check_rank(plan, rank)
        if named and len(set(named)) != plan.world_size:
            raise wrong(plan, "plan_rank", f"has copies on ranks {named}, but there are {plan.world_size} ranks.")
        rows, columns = (0, plan.table.num_embeddings), (0, plan.table.embedding_dim)
        return Cut([Shard(plan.table, rank, rows, columns) for rank in range(plan.world_size)], Stay())
