"""Plans that know more than TorchRec's: their ranks; and, those of recfx, their price and what they were made for."""

import copy
from collections.abc import Iterator, Mapping
from numbers import Integral
from typing import Any

from torchrec.distributed.planner import Topology
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan, ShardingType

from recfx.collections.pieces import rank_of
from recfx.collections.sharding.plan import MOST_RANKS
from recfx.collections.sharding.types import plan_error
from recfx.errors import ConversionError, Diagnostic
from recfx.planner.pricing.work import counted

_ON_ALL_RANKS = (ShardingType.DATA_PARALLEL.value, ShardingType.ROW_WISE.value)


class PricedPlan(ShardingPlan):
    """TorchRec's plan, which also knows its ranks and, if ``recfx.plan`` made it, its price and what it was made for.

    Args:
        plan: as in ``ShardingPlan``.
        world_size: the number of ranks; None if nobody has said it.
        topology: what it was made for, if that is known.
        seconds: the predicted time of a step, if it was priced.
        price: that in words, with the step that it is for, and how the plan was chosen; ``""`` if it was not priced.
    """

    def __init__(
        self,
        plan: dict[str, Any],
        world_size: int | None,
        topology: Topology | None = None,
        seconds: float | None = None,
        price: str = "",
    ) -> None:
        super().__init__(plan)
        self.world_size, self.topology, self.seconds, self.price = world_size, topology, seconds, price
        self._priced = _tables(plan)

    def __repr__(self) -> str:
        tables = [table for of_collection in self.plan.values() for table in of_collection.values()]
        ranks = "?" if self.world_size is None else f"{self.world_size:,}"
        kinds = counted(str(getattr(table, "sharding_type", table)) for table in tables)
        return f"PricedPlan(W={ranks}: {kinds}{'; ' * bool(self.price)}{self.price})"

    @property
    def is_as_priced(self) -> bool:
        """Whether no table was given another sharding since."""
        return _tables(self.plan) == self._priced


def price_of(plan: ShardingPlan | None) -> list[Diagnostic]:
    """What a report says about the price of a plan; nothing if the plan has none, because it is not recfx's own."""
    if not isinstance(plan, PricedPlan) or not plan.price:
        return []
    if not plan.is_as_priced:
        message = "the plan was changed after recfx.plan had made it, so it is not the one whose price is known."
        return [Diagnostic("plan_price", "", message, "ask recfx.compare_plans what the changed plan costs.")]
    return [Diagnostic("plan_price", "", f"the plan is {plan.price}")]


def _tables(plan: Mapping[str, Any]) -> dict[str, dict[str, object]]:
    """The tables of a plan, each with a copy of what the plan says about it."""
    return {path: {name: copy.copy(sharding) for name, sharding in tables.items()} for path, tables in plan.items()}


def world_size_of(plan: ShardingPlan, requested: int | None = None) -> int:
    """The ranks that a plan, the user or a table on all of them tells (``plan_rank``, ``unknown_world_size``)."""
    world_size = world_size_said(plan, requested) or _ranks_spanned(plan)
    if world_size is None:
        raise ConversionError(
            "no table of the plan is on all ranks, so it does not say for how many ranks it is.",
            reason="unknown_world_size",
            what_to_do="pass world_size=, or a topology; a plan of recfx.plan knows its ranks.",
        )
    return world_size


def _ranks_spanned(plan: ShardingPlan) -> int | None:
    """The number of ranks, if a table is on all of them, or if the plan names none at all; otherwise None."""
    by_path: dict[str, Any] = plan.plan
    tables = [table for of_path in by_path.values() for table in of_path.values()]
    named = [(table, list(_ranks(table))) for table in tables if isinstance(table, ParameterSharding)]
    last = max((rank for _, ranks in named for rank in ranks), default=0)
    if last >= MOST_RANKS:
        raise plan_error("plan_rank", f"the plan names rank {last:,}; there can be {MOST_RANKS:,} ranks.", "")
    spans = any(ranks and table.sharding_type in _ON_ALL_RANKS for table, ranks in named)
    return 1 + last if spans or not any(ranks for _, ranks in named) else None


def _ranks(table: ParameterSharding) -> Iterator[int]:
    ranks: Any = table.ranks
    yield from (int(rank) for rank in (ranks if isinstance(ranks, (list, tuple)) else ()) if isinstance(rank, Integral))
    if isinstance(table.sharding_spec, EnumerableShardingSpec):
        yield from (rank for shard in table.sharding_spec.shards if (rank := rank_of(shard)) is not None)


def world_size_said(plan: ShardingPlan, requested: int | None = None) -> int | None:
    """The number of ranks that a plan knows, or that the user gives; ``plan_rank`` if they disagree."""
    own = plan.world_size if isinstance(plan, PricedPlan) else None
    if own is not None and requested not in (None, own):
        raise ConversionError(
            f"the plan was made for {own:,} rank{'' if own == 1 else 's'}, not for {requested:,}.",
            reason="plan_rank",
            what_to_do="make a plan for as many ranks as there are: recfx.plan(model, topology).",
        )
    return own or requested
