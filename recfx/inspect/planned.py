"""A plan that a model is explained with: for which ranks it is, and what of it fits no collection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding, ShardingPlan

from recfx.diagnostics import Diagnostic, Severity
from recfx.errors import ConversionError
from recfx.inspect.describe_sharded import with_plan
from recfx.modules.collection import HashEmbeddingBagCollection


class PlannedSharding:
    """What is to be said of a plan.

    Seen by this rank of the default process group; without one by rank 0 of as many as the plan names.

    Args:
        plan: TorchRec's.

    Raises:
        ConversionError: ``invalid_argument``.
    """

    def __init__(self, plan: Any) -> None:
        if not isinstance(plan, ShardingPlan):
            raise ConversionError(
                f"plan is a {type(plan).__name__}.",
                reason="invalid_argument",
                what_to_do="pass a torchrec.distributed.types.ShardingPlan, from recfx.plan or TorchRec's planner.",
            )
        self.per_collection: Mapping[str, Any] = plan.plan
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        else:
            self.rank, self.world_size = 0, 1 + max(map(_last_rank, self._tables()), default=0)

    def _tables(self) -> list[ParameterSharding]:
        return [table for tables in self.per_collection.values() for table in tables.values()]

    def describe(self, described: dict[str, Any], collection: HashEmbeddingBagCollection, paths: list[str]) -> None:
        """Add to the fields of one collection what the plan does to it, or why it cannot."""
        planned = next((path for path in paths if path in self.per_collection), None)
        try:
            if planned is None:
                raise ConversionError(
                    "the plan says nothing of this collection.",
                    reason="plan_missing_collection",
                    module_path=paths[0],
                    what_to_do="make the plan from this model.",
                )
            tables = self.per_collection[planned]
            described.update(with_plan(described, collection, tables, self.rank, self.world_size, paths[0]))
        except ConversionError as error:
            described["reasons"] = (*described["reasons"], error.diagnostic)

    def unknown(self, paths: set[str]) -> list[Diagnostic]:
        """What the plan names beside the collections at ``paths``."""
        return [
            Diagnostic(
                "plan_unknown_collection",
                path,
                f"the plan names {path!r}, which is no converted collection; there are {sorted(paths)}.",
                "make the plan from this model.",
                Severity.ERROR,
            )
            for path in self.per_collection
            if path not in paths
        ]


def already_sharded(path: str) -> Diagnostic:
    """A plan for what has one."""
    message = "the collection is sharded already: what is said of it is its own plan, not the one given."
    return Diagnostic("already_sharded", path, message, "explain without plan=.", Severity.ERROR)


def _last_rank(table: ParameterSharding) -> int:
    ranks = list(table.ranks or [])
    if isinstance(table.sharding_spec, EnumerableShardingSpec):
        for shard in table.sharding_spec.shards:
            rank = getattr(shard.placement, "rank", None)
            found = rank() if callable(rank) else None
            ranks += [] if found is None else [int(found)]
    return max(ranks, default=0)
