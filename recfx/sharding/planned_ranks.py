"""The ranks that a plan names."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan

from recfx.errors import ConversionError
from recfx.sharding.placement import rank_of


def check_plan(plan: Any) -> None:
    """Refuse what is no plan of a whole model.

    Raises:
        ConversionError: ``invalid_argument``.
    """
    if not isinstance(plan, ShardingPlan):
        raise ConversionError(
            f"plan is a {type(plan).__name__}.",
            reason="invalid_argument",
            what_to_do="pass a torchrec.distributed.types.ShardingPlan, from recfx.plan or TorchRec's planner.",
        )


def ranks_named(plan: ShardingPlan) -> int:
    """The number of ranks up to the last one that a plan names."""
    per_collection: dict[str, Any] = plan.plan
    tables = [table for tables in per_collection.values() for table in tables.values()]
    return 1 + max((_last_rank(table) for table in tables if isinstance(table, ParameterSharding)), default=0)


def _last_rank(table: ParameterSharding) -> int:
    ranks = list(table.ranks or [])
    if isinstance(table.sharding_spec, EnumerableShardingSpec):
        for shard in table.sharding_spec.shards:
            rank = rank_of(shard)
            ranks += [] if rank is None else [rank]
    return max(ranks, default=0)
