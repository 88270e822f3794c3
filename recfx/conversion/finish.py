"""The last steps of ``convert``: making one graph of the result, or putting the result into the user's model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from recfx.collections.collection import unsharded_collections
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.copy_modules import copy_modules, replace_in_place
from recfx.collections.devices import usable_device
from recfx.collections.sharding.collection import leave_to_collections, sharded_collections
from recfx.collections.whole_graph import WholeGraph
from recfx.conversion.whole_graph import make_whole_graph
from recfx.discovery.classify import Finding
from recfx.discovery.sample import Sample
from recfx.discovery.wrappers import unwrap
from recfx.optim.keyed_optimizer import attach_fused_optimizer
from recfx.planner.priced_plan import price_of
from recfx.planner.shard_model import environment, plan_for, shard_collections
from recfx.replacement.conversion_record import add_notes, attach_conversion, conversion_of
from recfx.replacement.replace_collections import carry_references


def as_whole_graph(converted: nn.Module, call: Sample | None) -> nn.Module:
    """The converted model as a train and an eval graph over its modules."""
    assert call is not None
    if isinstance(converted, (WholeGraph, ConvertedCollection)):
        return converted  # a collection is a graph already
    graph = make_whole_graph(unwrap(converted), call)
    leave_to_collections(graph)
    if sharded_collections(graph):
        attach_fused_optimizer(graph)
    return graph


def patch(
    model: nn.Module, converted: nn.Module, replacements: Mapping[int, nn.Module], findings: list[Finding]
) -> nn.Module:
    """Put the replacements into ``model``, and return it; a model that is a collection itself is not patched."""
    if id(model) in replacements:
        return converted
    for finding in findings:
        if id(finding.module) in replacements:  # its hooks and attributes refer to the modules of the copy
            carry_references(finding.module, replacements[id(finding.module)])
    replace_in_place(model, replacements)
    attach_conversion(model, conversion_of(converted))
    return model


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


def place(converted: nn.Module, device: torch.device | str | None) -> None:
    """Move the model; tables on meta are allocated and initialised. With None, everything stays where it is."""
    if device is None:
        return
    device = usable_device(device)
    for collection in unsharded_collections(converted).values():
        if any(weight.is_meta for weight in collection.parameters()):
            collection.to_empty(device=device)
            collection.reset_parameters()
    converted.to(device)
