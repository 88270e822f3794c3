"""The ranks that a plan names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan, ShardingType

from recfx.collections.sharding.placement import rank_of
from recfx.collections.sharding.plan_errors import plan_error
from recfx.errors import ConversionError, type_of

MOST_RANKS = 2**20
"""More than any cluster has; something is listed for each of them."""

_ON_ALL_RANKS = (ShardingType.DATA_PARALLEL.value, ShardingType.ROW_WISE.value)


def check_plan(plan: Any) -> None:
    """Refuse what is no plan of a whole model: a mapping from collections to mappings from tables.

    Raises:
        ConversionError: ``invalid_argument``.
    """
    is_plan = isinstance(plan, ShardingPlan)
    if not is_plan or not isinstance(plan.plan, Mapping):
        raise ConversionError(
            f"plan.plan is {type_of(plan.plan)}." if is_plan else f"plan is {type_of(plan)}.",
            reason="invalid_argument",
            what_to_do="pass a torchrec.distributed.types.ShardingPlan, from recfx.plan or TorchRec's planner.",
        )
    for path, tables in plan.plan.items():
        if not isinstance(tables, Mapping):
            raise plan_error("invalid_argument", f"the plan of a collection is {type_of(tables)}.", str(path))


def ranks_named(plan: ShardingPlan) -> int:
    """The number of ranks up to the last one that a plan names; what is no rank is left to those who read the plan.

    Raises:
        ConversionError: ``plan_rank``: no cluster has so many.
    """
    per_collection: dict[str, Any] = plan.plan
    last = 0
    for path, tables in per_collection.items():
        here = max((rank for table in tables.values() for rank in _ranks(table)), default=0)
        if here >= MOST_RANKS:
            raise plan_error("plan_rank", f"the plan names rank {here:,}; there can be {MOST_RANKS:,} ranks.", path)
        last = max(last, here)
    return 1 + last


def ranks_spanned(plan: ShardingPlan) -> int | None:
    """The number of ranks, if a table is on all of them, or if the plan names none at all; otherwise None.

    Raises:
        ConversionError: ``plan_rank``: no cluster has so many.
    """
    tables = [table for each in plan.plan.values() for table in each.values() if isinstance(table, ParameterSharding)]
    spans = any(table.sharding_type in _ON_ALL_RANKS and any(True for _ in _ranks(table)) for table in tables)
    is_named = any(True for table in tables for _ in _ranks(table))
    return ranks_named(plan) if spans or not is_named else None


def _ranks(table: object) -> Iterator[int]:
    if not isinstance(table, ParameterSharding):
        return
    given: Any = table.ranks
    for rank in given if isinstance(given, (list, tuple)) else ():
        if isinstance(rank, Integral):
            yield int(rank)
    if isinstance(table.sharding_spec, EnumerableShardingSpec):
        for shard in table.sharding_spec.shards:
            found = rank_of(shard)
            if found is not None:
                yield found
