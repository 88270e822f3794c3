"""How many ranks a plan is for, and what hardware: what it knows itself, what the user says, but never a guess."""

from __future__ import annotations

from torchrec.distributed.types import ShardingPlan

from recfx.collections.sharding.whole_plan import ranks_named, ranks_spanned
from recfx.errors import ConversionError
from recfx.planner.hardware_of import AnyTopology
from recfx.planner.priced_plan import PricedPlan


def world_size_of(plan: ShardingPlan, given: int | None = None) -> int:
    """The number of ranks of a plan.

    Args:
        plan: a plan. One of ``recfx.plan`` knows its ranks; of another, tables that are on all ranks tell.
        given: the number of ranks, if the user says so.

    Raises:
        ConversionError: ``plan_rank``: the plan was made for another number of ranks; ``unknown_world_size``: neither
            the plan nor the user says it.
    """
    own = plan.world_size if isinstance(plan, PricedPlan) else None
    if own is not None and given not in (None, own):
        raise ConversionError(
            f"the plan was made for {own:,} rank{'' if own == 1 else 's'}, not for {given:,}.",
            reason="plan_rank",
            what_to_do="make a plan for as many ranks as there are: recfx.plan(model, topology).",
        )
    found = own or given or ranks_spanned(plan)
    if found is None:
        named = ranks_named(plan)
        raise ConversionError(
            f"no table of the plan is on all ranks, so it may be for {named:,} ranks or for more.",
            reason="unknown_world_size",
            what_to_do="pass world_size=, or a topology; a plan of recfx.plan knows its ranks.",
        )
    return found


def topology_of(plan: ShardingPlan | None) -> AnyTopology | None:
    """The topology that a plan was made for; None if it is not recfx's own."""
    return plan.topology if isinstance(plan, PricedPlan) else None
