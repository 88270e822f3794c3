"""A model as a plan would shard it over ranks that are not there, so that their graphs can be drawn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recfx.discovery.discover import discover
from recfx.discovery.recorded import recorded
from recfx.errors import DrawingError
from recfx.modules.converted_collection import ConvertedCollection
from recfx.modules.copy_modules import copy_modules
from recfx.modules.whole_graph import WholeGraph
from recfx.planner.hardware_of import check_topology
from recfx.planner.plan import plan_of_collections as make_plan
from recfx.planner.planned_ranks import world_size_of
from recfx.planner.shard_model import shard_collections
from recfx.planner.topology import NpuTopology
from recfx.pricing.values import whole_number
from recfx.record.conversion import attach_conversion, conversion_of
from recfx.record.wrappers import unwrap
from recfx.replacement.dry_run import dry_run, unchanged
from recfx.sharding.held_interrupts import held_interrupts, interrupts
from recfx.sharding.ranks_named import MOST_RANKS, check_plan


def as_planned(
    model_or_graph: nn.Module,
    topology: Topology | NpuTopology | None,
    plan: ShardingPlan | None,
    world_size: int | None,
) -> nn.Module:
    """A copy of the model as rank 0 would have it; the tables of the copy are on meta.

    Args:
        model_or_graph: a model that is not sharded.
        topology: what ``recfx.plan`` plans for, without a plan.
        plan: the plan.
        world_size: the number of ranks that ``plan`` is for; see :func:`recfx.planner.planned_ranks.world_size_of`.

    Raises:
        DrawingError: ``invalid_argument``, ``already_sharded``, ``in_process_group``.
        InputError: ``invalid_argument``: ``world_size`` is no number of ranks.
        ConversionError: ``invalid_topology``, and those of ``recfx.plan`` and of sharding.
    """
    model = unwrap(model_or_graph)
    ranks = None if world_size is None else whole_number(world_size, "world_size", most=MOST_RANKS)
    _check(model, topology, plan, ranks)
    with unchanged(model):
        discovery = discover(model)
        converted, _ = copy_modules(model, dry_run(discovery))
    conversion = recorded(discovery, "keep", before=conversion_of(model))
    if plan is None:
        assert topology is not None  # one of them is given
        plan = make_plan(model, topology)
    ranks = world_size_of(plan, ranks or (None if topology is None else topology.world_size))

    def shard(env: ShardingEnv) -> nn.Module:
        found, _ = copy_modules(converted, shard_collections(converted, plan, env, torch.device("meta")))
        return found

    sharded = _as_rank_0(ranks, shard)
    attach_conversion(sharded, conversion)
    return sharded


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
    if dist.is_available() and dist.is_initialized():
        raise DrawingError(
            "this process has a process group, and a plan for ranks that are not there is drawn with a stand-in for "
            "one.",
            reason="in_process_group",
            what_to_do="draw it in a process by itself; or convert the model with plan= and env=, and draw that.",
        )


def _as_rank_0(world_size: int, shard: Callable[[ShardingEnv], nn.Module]) -> nn.Module:
    """Call ``shard`` as rank 0 of ranks with which nobody can communicate; torch's own means to plan without them.

    Ctrl-C is kept while torch makes and forgets the group, so that nothing of it is left.
    """
    with held_interrupts():
        hook = sys.excepthook  # torch wraps it, for good
        try:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
            assert dist.group.WORLD is not None
            with interrupts(allowed=True):
                return shard(ShardingEnv.from_process_group(dist.group.WORLD))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            sys.excepthook = hook
