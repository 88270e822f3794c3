"""Shards every converted collection of a model, for ``recfx.convert(model, plan=..., env=...)``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recfx.collections.collection import UnshardedCollection, unsharded_collections
from recfx.collections.converted_collection import collections_by_prefix
from recfx.collections.sharding.collection import shard_collection
from recfx.collections.sharding.ranks_agree import on_all_ranks
from recfx.collections.sharding.whole_plan import plan_of_collection, refuse_unknown_collections
from recfx.errors import ConversionError, RecfxError
from recfx.planner.plan import plan_of_collections as make_plan
from recfx.planner.priced_plan import world_size_of
from recfx.planner.topology import plain_topology


def shard_collections(
    model: nn.Module, plan: ShardingPlan, env: ShardingEnv, device: torch.device | str | None
) -> dict[int, nn.Module]:
    """The sharded form of every converted collection, by ``id``; ``model`` is not changed. Collective."""
    collections = unsharded_collections(model)
    paths: dict[int, list[str]] = {}
    for prefix, module in collections_by_prefix(model, UnshardedCollection):
        paths.setdefault(id(module), []).append(prefix.removesuffix("."))
    target = None if device is None else torch.device(device)
    world_size_of(plan, env.world_size)
    refuse_unknown_collections(plan, {path for aliases in paths.values() for path in aliases})
    sharded: dict[int, nn.Module] = {}
    for path, collection in collections.items():
        planned = plan_of_collection(plan, [path, *paths[id(collection)]])
        sharded[id(collection)] = shard_collection(collection, planned, env, target, path=path)
    return sharded


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


def plan_for(model: nn.Module, env: ShardingEnv, device: torch.device | str | None) -> ShardingPlan:
    """The plan of ``recfx.plan``; rank 0 makes it, and all ranks get it, or its error. Collective."""
    target = None if device is None else torch.device(device)
    collection = next(iter(unsharded_collections(model).values()), None)
    if target is None and collection is not None:
        target = next((parameter.device for parameter in collection.parameters()), None)
    kind = "cpu" if target is None or target.type == "meta" else target.type
    topology = plain_topology(env.world_size, kind)

    def make() -> ShardingPlan | None:
        return make_plan(model, topology) if env.rank == 0 or env.process_group is None else None

    plans = on_all_ranks(env.process_group, make, lambda error: error if isinstance(error, RecfxError) else None)
    plan = next(made for made in plans if made is not None)
    return plan
