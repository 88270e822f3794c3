"""A plan that a model is explained with: which ranks it is for, and which parts of it fit no collection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from recfx.diagnostics import Diagnostic, Severity
from recfx.errors import ConversionError
from recfx.inspect.collection_report import CollectionReport
from recfx.inspect.describe import with_reasons
from recfx.inspect.describe_sharded import with_plan
from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.planner.priced_plan import price_of
from recfx.sharding.planned_ranks import check_plan, ranks_named


class PlannedSharding:
    """What the report says about a plan.

    It is seen by this rank of the default process group or, without a process group, by rank 0 of as many ranks as the
    plan names.

    Args:
        plan: TorchRec's plan.

    Raises:
        ConversionError: ``invalid_argument``.
    """

    def __init__(self, plan: Any) -> None:
        check_plan(plan)
        self.per_collection: Mapping[str, Any] = plan.plan
        self._plan = plan
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        else:
            self.rank, self.world_size = 0, ranks_named(plan)

    def describe(self, described: CollectionReport, collection: HashEmbeddingBagCollection) -> CollectionReport:
        """Add what the plan does to a collection that ``describe_converted`` has described, or why it cannot."""
        planned = next((path for path in described.paths if path in self.per_collection), None)
        try:
            if planned is None:
                raise ConversionError(
                    "the plan does not name this collection.",
                    reason="plan_missing_collection",
                    module_path=described.path,
                    what_to_do="make the plan from this model.",
                )
            return with_plan(described, collection, self.per_collection[planned], self.rank, self.world_size)
        except ConversionError as error:
            described = with_reasons(described)
            return replace(described, reasons=(*described.reasons, error.diagnostic))

    def price(self) -> list[Diagnostic]:
        """How the plan was chosen, if recfx made it."""
        return price_of(self._plan)

    def unknown(self, paths: set[str]) -> list[Diagnostic]:
        """What the plan names that is not among the collections at ``paths``."""
        return [
            Diagnostic(
                "plan_unknown_collection",
                path,
                f"the plan names {path!r}, which is not a converted collection; the model has {sorted(paths)}.",
                "make the plan from this model.",
                Severity.ERROR,
            )
            for path in self.per_collection
            if path not in paths
        ]


def already_sharded(described: CollectionReport) -> CollectionReport:
    """Add that the collection has a plan of its own, and that the one given says nothing about it."""
    message = "the collection is already sharded: the report describes its own plan, not the one given."
    reason = Diagnostic("already_sharded", described.path, message, "explain without plan=.", Severity.ERROR)
    return replace(described, reasons=(*described.reasons, reason))
