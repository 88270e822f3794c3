"""Plans that know more than TorchRec's: their ranks; and, those of recfx, their price and what they were made for."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan

from recfx.collections.sharding.plan import ranks_named, ranks_spanned
from recfx.errors import ConversionError, Diagnostic
from recfx.planner.pricing.work import in_time


@dataclass(frozen=True)
class PlanPrice:
    """What one plan that was tried would cost."""

    seconds: float  # the predicted time of a step
    parts: Mapping[str, float]  # how it is made up: ids, tables, output, wire, dense
    types: Mapping[str, str]  # the sharding type of every table, by ``<collection>.<table>``

    def __str__(self) -> str:
        counts = Counter(self.types.values()).most_common()
        return ", ".join(f"{count} {name}" for name, count in counts)


@dataclass(frozen=True)
class Pricing:
    """How a plan was chosen."""

    step: str  # the step that times were predicted for, with its hardware and its batch
    tried: int  # the number of plans that fit
    priced: int  # how many of them, the best by estimates, were priced
    chosen: PlanPrice  # the cheapest
    runner_up: PlanPrice | None = None  # the cheapest of the others; None if there was no other

    def __str__(self) -> str:
        text = f"{self.chosen}, {self.step_text}"
        if self.runner_up is None:
            only = "the only one that TorchRec's planner found within the constraints and the memory of the ranks"
            return f"{only if self.tried == 1 else f'the best of {self.tried:,}'}: {text}."
        return (
            f"the cheapest of the {self.priced} best of {self.tried:,} plans: {text}; the runner-up "
            f"({self.runner_up}) takes {in_time(self.runner_up.seconds)}."
        )

    @property
    def step_text(self) -> str:
        """The predicted time of the plan, and the step that it is predicted for."""
        return f"{in_time(self.chosen.seconds)} predicted for a {self.step}"


class PricedPlan(ShardingPlan):
    """TorchRec's plan, which also knows its ranks and, if ``recfx.plan`` made it, its price and what it was made for.

    Args:
        plan: as in ``ShardingPlan``.
        world_size: the number of ranks; None if nobody has said it.
        topology: what it was made for, if that is known.
        pricing: how it was chosen; None if nothing was priced.
    """

    def __init__(
        self,
        plan: dict[str, Any],
        world_size: int | None,
        topology: Topology | None = None,
        pricing: Pricing | None = None,
    ) -> None:
        super().__init__(plan)
        self.world_size, self.topology, self.pricing, self._priced = world_size, topology, pricing, _tables(plan)

    def __repr__(self) -> str:
        per_collection: dict[str, Any] = self.plan
        types = Counter(str(table.sharding_type) for tables in per_collection.values() for table in tables.values())
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in types.most_common())
        ranks = "?" if self.world_size is None else f"{self.world_size:,}"
        price = "" if self.pricing is None else f"; {self.pricing.step_text}"
        return f"PricedPlan(W={ranks}: {kinds}{price})"

    @property
    def is_as_priced(self) -> bool:
        """Whether no table was given another sharding since."""
        return _tables(self.plan) == self._priced


def price_of(plan: ShardingPlan | None) -> list[Diagnostic]:
    """What a report says about the price of a plan; nothing if the plan has none, because it is not recfx's own."""
    if not isinstance(plan, PricedPlan) or plan.pricing is None:
        return []
    if not plan.is_as_priced:
        message = "the plan was changed after recfx.plan had made it, so it is not the one whose price is known."
        return [Diagnostic("plan_price", "", message, "ask recfx.compare_plans what the changed plan costs.")]
    return [Diagnostic("plan_price", "", f"the plan is {plan.pricing}")]


def _tables(plan: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    """The tables of a plan, each with a copy of what the plan says about it."""
    return {path: {name: copy.copy(sharding) for name, sharding in tables.items()} for path, tables in plan.items()}


def world_size_of(plan: ShardingPlan, requested: int | None = None) -> int:
    """The number of ranks of a plan: what the plan knows, what the user gives, or what tables on all ranks tell.
    Raises ``plan_rank`` if plan and user disagree, and ``unknown_world_size`` if nobody says it.
    """
    world_size = world_size_said(plan, requested) or ranks_spanned(plan)
    if world_size is None:
        named = ranks_named(plan)
        raise ConversionError(
            f"no table of the plan is on all ranks, so it may be for {named:,} ranks or for more.",
            reason="unknown_world_size",
            what_to_do="pass world_size=, or a topology; a plan of recfx.plan knows its ranks.",
        )
    return world_size


def world_size_said(plan: ShardingPlan, requested: int | None = None) -> int | None:
    """The number of ranks that a plan knows, or that the user gives; None if neither. Raises ``plan_rank`` if they
    disagree.
    """
    own = plan.world_size if isinstance(plan, PricedPlan) else None
    if own is not None and requested not in (None, own):
        raise ConversionError(
            f"the plan was made for {own:,} rank{'' if own == 1 else 's'}, not for {requested:,}.",
            reason="plan_rank",
            what_to_do="make a plan for as many ranks as there are: recfx.plan(model, topology).",
        )
    return own or requested
