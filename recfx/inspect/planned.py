"""A plan that a model is explained with: which ranks it is for, and which parts of it fit no collection."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from recfx.collections.collection import UnshardedCollection
from recfx.collections.sharding.whole_plan import (
    MOST_RANKS,
    check_plan,
    plan_of_collection,
    refuse_unknown_collections,
)
from recfx.errors import ConversionError, Diagnostic
from recfx.inspect.describe import with_reasons
from recfx.inspect.describe_sharded import with_plan
from recfx.inspect.report_data import CollectionReport
from recfx.planner.priced_plan import price_of, topology_of, world_size_of
from recfx.planner.pricing.values import whole_number


class PlannedSharding:
    """What the report says about a plan.

    It is seen by this rank of the default process group, if that has as many ranks as the plan; otherwise by rank 0.

    Args:
        plan: TorchRec's plan.
        world_size: the number of ranks that it is for, if the user says so.

    Raises:
        ConversionError: ``invalid_argument``, ``plan_rank``, ``unknown_world_size``.
        InputError: ``invalid_argument``: ``world_size`` is no number of ranks.
    """

    def __init__(self, plan: Any, world_size: int | None = None) -> None:
        check_plan(plan)
        self._plan = plan
        given = None if world_size is None else whole_number(world_size, "world_size", most=MOST_RANKS)
        in_group = dist.is_available() and dist.is_initialized()
        if given is None and in_group:
            given = dist.get_world_size()  # as for convert
        self.world_size = world_size_of(plan, given)
        self.rank = dist.get_rank() if in_group and dist.get_world_size() == self.world_size else 0
        self._unknown: list[Diagnostic] = []

    @classmethod
    def of(cls, plan: Any, world_size: int | None) -> PlannedSharding | None:
        """None without a plan.

        Raises:
            ConversionError: as for the class; ``invalid_argument``: there is a number of ranks alone.
            InputError: as for the class.
        """
        if plan is None and world_size is not None:
            raise ConversionError(
                "world_size is given, but no plan for so many ranks.",
                reason="invalid_argument",
                what_to_do="pass plan= as well, such as that of recfx.plan(model, topology).",
            )
        return None if plan is None else cls(plan, world_size)

    def check(self, paths: Collection[str]) -> None:
        """Look whether the plan names something else than the collections that can be sharded, at ``paths``."""
        try:
            refuse_unknown_collections(self._plan, paths)
        except ConversionError as error:
            self._unknown = [error.diagnostic]

    def describe(self, described: CollectionReport, collection: UnshardedCollection) -> CollectionReport:
        """Add what the plan does to a collection that ``describe_converted`` has described, or why it cannot."""
        try:
            planned = plan_of_collection(self._plan, described.paths)
            return with_plan(described, collection, planned, self.rank, self.world_size, topology_of(self._plan))
        except ConversionError as error:
            described = with_reasons(described)
            return replace(described, reasons=(*described.reasons, error.diagnostic))

    def reasons(self) -> list[Diagnostic]:
        """How the plan was chosen, if recfx made it, and what it names that cannot be sharded."""
        return price_of(self._plan) + self._unknown
