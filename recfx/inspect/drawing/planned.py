"""A model as a plan would shard it over ranks that are not there: graphs of rank 0 that are data, and their costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.sharding.optimizer_settings import check_optimizers
from recfx.collections.sharding.whole_plan import MOST_RANKS, check_plan
from recfx.collections.whole_graph import WholeGraph
from recfx.conversion.replacement.conversion_record import Conversion, conversion_of, recorded
from recfx.conversion.replacement.dry_run import converted_by_path, unchanged
from recfx.discovery.classify import Finding
from recfx.discovery.discover import discover
from recfx.discovery.wrappers import unwrap
from recfx.errors import DrawingError
from recfx.inspect.cost import price_planned
from recfx.passes import Rewriting
from recfx.planner.plan import plan_of_collections as make_plan
from recfx.planner.priced_plan import topology_of, world_size_of
from recfx.planner.pricing.cost import Cost
from recfx.planner.pricing.hardware import Hardware
from recfx.planner.pricing.values import whole_number
from recfx.planner.topology import NpuTopology, check_topology, hardware_of


@dataclass(frozen=True)
class PlannedModel:
    """What a plan would make of a model.

    Args:
        findings: its collections as they are now.
        conversion: what a conversion would record of them.
        graphs: what the passes make of those that are sharded, on rank 0, by path.
        cost: of rank 0.
        hardware: what the plan is for, if that is known.
    """

    findings: list[Finding]
    conversion: Conversion
    graphs: Mapping[str, Rewriting]
    cost: Cost
    hardware: Hardware | None


def as_planned(
    model_or_graph: nn.Module,
    topology: Topology | NpuTopology | Hardware | None,
    plan: ShardingPlan | None,
    world_size: int | None,
) -> PlannedModel:
    """What a plan would make of a model; the model stays as it is, and nothing is communicated.

    Args:
        model_or_graph: a model that is not sharded.
        topology: what ``recfx.plan`` plans for, without a plan; or hardware that the plan is for.
        plan: the plan.
        world_size: the number of ranks that ``plan`` is for; see :func:`recfx.planner.priced_plan.world_size_of`.

    Raises:
        DrawingError: ``invalid_argument``, ``already_sharded``.
        InputError: ``invalid_argument``: ``world_size`` is no number of ranks.
        ConversionError: ``invalid_topology``, and those of ``recfx.plan`` and of sharding.
    """
    model = unwrap(model_or_graph)
    ranks = None if world_size is None else whole_number(world_size, "world_size", most=MOST_RANKS)
    given = None if isinstance(topology, Hardware) else topology
    _check(model, given, plan, ranks)
    with unchanged(model):
        discovery = discover(model)
        converted = converted_by_path(model, discovery)
    if plan is None:
        assert given is not None  # one of them is given
        plan = make_plan(model, given)
    ranks = world_size_of(plan, ranks or (None if given is None else given.world_size))
    topology = topology_of(plan) if topology is None else topology
    cost, graphs = price_planned(model, converted, plan, ranks, topology)
    for path in graphs:
        check_optimizers(converted[path])
    conversion = recorded(discovery, "keep", before=conversion_of(model))
    hardware = topology if topology is None or isinstance(topology, Hardware) else hardware_of(topology)
    return PlannedModel(discovery.findings, conversion, graphs, cost, hardware)


def _check(model: nn.Module, topology: Any, plan: Any, ranks: int | None) -> None:
    if topology is not None:
        check_topology(topology)
    if plan is not None:
        check_plan(plan)
    if plan is None and (topology is None or ranks not in (None, topology.world_size)):
        raise DrawingError(
            "world_size is given, but no plan for so many ranks.",
            reason="invalid_argument",
            what_to_do="pass plan= as well, or a topology instead, for which a plan is made.",
        )
    is_sharded = any(isinstance(each, ConvertedCollection) and each.is_sharded for each in model.modules())
    if is_sharded or isinstance(model, (torch.fx.GraphModule, WholeGraph)):
        raise DrawingError(
            f"{'it' if is_sharded else 'a graph'} has its own plan, and cannot be drawn with another.",
            reason="already_sharded",
            what_to_do="leave out topology=, plan= and world_size=, or pass the model before it is sharded or a graph.",
        )
