"""What the plan of a whole model names: collections and ranks; and the errors for which a plan is refused."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch.distributed._shard.metadata import ShardMetadata
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan, ShardingType

from recfx.errors import ConversionError, type_of

_ADVICE = {
    "invalid_argument": "pass a dict from table name to torchrec.distributed.types.ParameterSharding.",
    "plan_unknown_table": "make the plan from this model, or rename or remove the table in it.",
    "plan_missing_table": "make the plan from this model.",
    "unsupported_sharding_type": "use one of the seven types of torchrec.distributed.types.ShardingType.",
    "unsupported_compute_kernel": "constrain the planner to compute_kernels=['fused', 'dense'].",
    "unsupported_plan_option": "leave it out of the constraints.",
    "plan_shape_mismatch": "pass the model that the plan was made from: hashing may have given the table more rows.",
    "plan_rank": "make the plan for this number of ranks.",
    "plan_invalid": "make the plan with torchrec's planner, or construct_module_sharding_plan.",
    "ranks_have_different_plans": "pass the same plan on every rank: make it on one of them and broadcast it, as "
    "collective_plan of TorchRec's planner does, or make it from the same arguments everywhere.",
}


def plan_error(reason: str, message: str, path: str) -> ConversionError:
    """The error of a plan; ``path`` is the fully qualified name of the collection."""
    return ConversionError(message, reason=reason, module_path=path, what_to_do=_ADVICE[reason])


def table_error(reason: str, table: str, what: str, path: str) -> ConversionError:
    """The error of the plan of one table; ``what`` says what the plan does, as the rest of the sentence."""
    return plan_error(reason, f"the plan of table {table!r} {what}", path)


def rank_of(shard: ShardMetadata) -> int | None:
    """The rank of a shard's placement; None if it names no rank, such as ``cpu``."""
    rank = getattr(shard.placement, "rank", None)
    number = rank() if callable(rank) else None
    return None if number is None else int(number)


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
    tables = [
        table
        for of_collection in plan.plan.values()
        for table in of_collection.values()
        if isinstance(table, ParameterSharding)
    ]
    spans = any(table.sharding_type in _ON_ALL_RANKS and any(True for _ in _ranks(table)) for table in tables)
    is_named = any(True for table in tables for _ in _ranks(table))
    return ranks_named(plan) if spans or not is_named else None


def _ranks(table: object) -> Iterator[int]:
    if not isinstance(table, ParameterSharding):
        return
    ranks: Any = table.ranks
    for rank in ranks if isinstance(ranks, (list, tuple)) else ():
        if isinstance(rank, Integral):
            yield int(rank)
    if isinstance(table.sharding_spec, EnumerableShardingSpec):
        for shard in table.sharding_spec.shards:
            number = rank_of(shard)
            if number is not None:
                yield number


def refuse_unknown_collections(plan: ShardingPlan, known: Collection[str]) -> None:
    """Refuse a plan that names a collection which recfx does not shard.

    Raises:
        ConversionError: ``plan_unknown_collection``.
    """
    for path in plan.plan:
        if path not in known:
            raise ConversionError(
                f"the plan names {path!r}, which is not a converted collection; the model has {sorted(known)}.",
                reason="plan_unknown_collection",
                module_path=path,
                what_to_do="make the plan from this model; modules that recfx does not convert are sharded by "
                "DistributedModelParallel(model, plan=plan, sharders=recfx.sharders()).",
            )


def plan_of_collection(plan: ShardingPlan, paths: Sequence[str]) -> Any:
    """The plan of the collection that has the names ``paths``, by table.

    Raises:
        ConversionError: ``plan_missing_collection``.
    """
    for path in paths:
        if path in plan.plan:
            return plan.plan[path]
    raise ConversionError(
        "the plan does not name this collection.",
        reason="plan_missing_collection",
        module_path=paths[0],
        what_to_do="make the plan from this model.",
    )
