"""``recfx.compare_plans``: what several plans for one model would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.types import ShardingPlan

from recfx.errors import ConversionError, type_of
from recfx.inspect.cost import cost
from recfx.planner.pricing.cost import PlanComparison, PlanRow
from recfx.planner.pricing.values import BATCH_SIZE, LENGTH


def compare_plans(
    model: nn.Module,
    plans: Sequence[ShardingPlan] | Mapping[str, ShardingPlan],
    *,
    topology: Any = None,
    world_size: int | None = None,
    B: int = BATCH_SIZE,
    L: Any = LENGTH,
) -> PlanComparison:
    """What each of ``plans`` would cost per step, without processes and without tables.

    Args:
        model: a model that is not sharded, converted or not; it may be on meta.
        plans: plans for it, or plans by name.
        topology: as for ``recfx.cost``. Plans that ``recfx.plan`` made for different hardware need one.
        world_size: the number of ranks of all plans. Default: for each plan, as for ``recfx.cost``.
        B: samples per rank.
        L: the mean number of ids per sample: a number for all features, or a mapping with one for each.

    Raises:
        ConversionError: as ``recfx.cost`` does; ``invalid_argument`` without plans.
        InputError: ``invalid_argument``, ``missing_feature``.
    """
    if not isinstance(plans, (Mapping, list, tuple)) or not plans:
        found = "empty" if isinstance(plans, (Mapping, list, tuple)) else type_of(plans)
        raise ConversionError(
            f"plans is {found}.",
            reason="invalid_argument",
            what_to_do="pass a list of plans, or a mapping from names to plans.",
        )
    named = plans if isinstance(plans, Mapping) else {f"plan {number}": each for number, each in enumerate(plans)}
    rows = []
    for name, plan in named.items():
        if plan is None:
            raise ConversionError(
                f"{name} is None.", reason="invalid_argument", what_to_do="pass plans, such as those of recfx.plan."
            )
        priced = cost(model, topology, plan=plan, world_size=world_size).at(B, L=L)
        rows.append(PlanRow(str(name), _types(plan), priced))
    hardware = {row.name: row.cost.hardware for row in rows}
    other = next((name for name, each in hardware.items() if each != rows[0].cost.hardware), None)
    if other is not None:
        raise ConversionError(
            f"{rows[0].name} was made for {rows[0].cost.hardware.name}, but {other} is priced for "
            f"{hardware[other].name} with constants of its own: their times say nothing about each other.",
            reason="invalid_argument",
            what_to_do="pass topology=, what to compare them on.",
        )
    return PlanComparison(tuple(rows))


def _types(plan: ShardingPlan) -> dict[str, str]:
    per_collection: dict[str, Any] = plan.plan
    return {
        f"{path}.{table}" if path else table: str(parameter.sharding_type)
        for path, tables in per_collection.items()
        for table, parameter in tables.items()
    }
