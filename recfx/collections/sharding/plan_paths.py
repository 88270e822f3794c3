"""Which part of a plan is that of which collection; the names are those of the collections in the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torchrec.distributed.types import ShardingPlan

from recfx.errors import ConversionError


def refuse_unknown_collections(plan: ShardingPlan, known: Collection[str]) -> None:
    """Refuse a plan that names a collection which recfx does not shard.

    Args:
        plan: of the model.
        known: every name of every converted collection.

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
