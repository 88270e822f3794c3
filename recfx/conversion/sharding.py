"""``convert`` with a plan or an environment: sharded collections in place of the converted ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recfx.collections.collection import unsharded_collections
from recfx.collections.copy_modules import copy_modules, replace_in_place
from recfx.collections.sharding.collection import leave_to_collections
from recfx.discovery.conversion_record import add_notes, attach_conversion, conversion_of
from recfx.optim.keyed_optimizer import attach_fused_optimizer
from recfx.planner.priced_plan import price_of
from recfx.planner.shard_model import environment, plan_for, shard_collections


def shard_model(
    converted: nn.Module,
    plan: ShardingPlan | None,
    env: ShardingEnv | None,
    device: torch.device | str | None,
    inplace: bool,
) -> nn.Module:
    """Shard the collections over all ranks; the rest of the model stays as it is."""
    conversion = conversion_of(converted)  # it is stored on the root, which may be a collection itself
    env = environment(env)
    plan = plan_for(converted, env, device) if plan is None else plan
    sharded = shard_collections(converted, plan, env, device)
    if inplace and id(converted) not in sharded:
        replace_in_place(converted, sharded)
        model = converted
    else:
        model, _ = copy_modules(converted, sharded)
    attach_conversion(model, conversion)
    add_notes(model, price_of(plan))
    leave_to_collections(model)
    attach_fused_optimizer(model)
    return model


def sharded_replacements(
    replacements: Mapping[int, nn.Module], before: nn.Module, after: nn.Module
) -> dict[int, nn.Module]:
    """The sharded collection that takes the place of each original, by the ``id`` of the original."""
    path_of = {id(collection): path for path, collection in unsharded_collections(before).items()}
    return {original: after.get_submodule(path_of[id(collection)]) for original, collection in replacements.items()}
