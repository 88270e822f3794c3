"""Shards every converted collection of a model, for ``recfx.convert(model, plan=..., env=...)``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recfx.collections.collection import UnshardedCollection, unsharded_collections
from recfx.collections.converted_collection import collections_by_prefix
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.plan import on_all_ranks_with_plan, plan_of_collection, refuse_unknown_collections
from recfx.collections.sharding.shard import shard_collection
from recfx.errors import ConversionError
from recfx.planner.plan import plan_of_collections as make_plan
from recfx.planner.priced_plan import world_size_of
from recfx.planner.topology import plain_topology


def shard_collections(
    model: nn.Module, plan: ShardingPlan, env: ShardingEnv, device: torch.device | str | None
) -> dict[int, ShardedCollection]:
    """The sharded form of every converted collection, by ``id``; ``model`` is not changed. Collective."""
    target, plans = None if device is None else torch.device(device), _plans_of_collections(model, plan, env)
    return {
        id(collection): shard_collection(collection, plans[path], env, target, path=path)
        for path, collection in unsharded_collections(model).items()
    }


def _plans_of_collections(model: nn.Module, plan: ShardingPlan, env: ShardingEnv) -> dict[str, Any]:
    """The plan of each collection, by its first path; refuses a plan that is not for this model."""
    paths: dict[int, list[str]] = {}
    for prefix, module in collections_by_prefix(model, UnshardedCollection):
        paths.setdefault(id(module), []).append(prefix.removesuffix("."))
    world_size_of(plan, env.world_size)
    refuse_unknown_collections(plan, {path for aliases in paths.values() for path in aliases})
    collections = unsharded_collections(model)
    return {path: plan_of_collection(plan, [path, *paths[id(module)]]) for path, module in collections.items()}


def environment(env: ShardingEnv | None) -> ShardingEnv:
    """The ranks to shard over: ``env`` or, without one, all ranks of the default process group."""
    if env is not None:
        return env
    if not (dist.is_available() and dist.is_initialized()):
        raise ConversionError(
            "there is no process group to shard over.",
            reason="no_process_group",
            what_to_do="call torch.distributed.init_process_group first, or pass "
            "env=ShardingEnv.from_process_group(...).",
        )
    return ShardingEnv.from_process_group(dist.group.WORLD)


def plan_for(
    model: nn.Module, given: ShardingPlan | None, env: ShardingEnv, device: torch.device | str | None
) -> ShardingPlan:
    """The plan that is given, or that of ``recfx.plan``; rank 0 makes it, and all ranks get it. Collective.

    Raises:
        ConversionError: ``ranks_have_different_plans``; what ``recfx.plan`` raises; the plan is not for this model.
    """
    target = None if device is None else torch.device(device)
    collection = next(iter(unsharded_collections(model).values()), None)
    if target is None and collection is not None:
        target = next((parameter.device for parameter in collection.parameters()), None)
    kind = "cpu" if target is None or target.type == "meta" else target.type
    topology = plain_topology(env.world_size, kind)

    def make() -> ShardingPlan | None:
        if given is not None:
            _plans_of_collections(model, given, env)
            return None
        return make_plan(model, topology) if env.rank == 0 or env.process_group is None else None

    plans = on_all_ranks_with_plan(env.process_group, given, make)
    return next(made for made in plans if made is not None) if given is None else given
