"""Carries over what users attach to a module to the module that takes its place."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recfx.hooks import MODULE_HOOKS
from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.modules.copy_modules import copy_modules
from recfx.modules.table_holder import release


def carry_hooks(source: nn.Module, replacement: nn.Module) -> None:
    """Give ``replacement`` the hooks of ``source``."""
    for name in MODULE_HOOKS:
        value = source.__dict__.get(name)
        replacement.__dict__[name] = value.copy() if isinstance(value, dict) else value


def carry_over(source: nn.Module, replacement: nn.Module, skip: frozenset[str] = frozenset()) -> None:
    """Give ``replacement`` the attributes that the user or a subclass put on ``source``, except hooks."""
    for name, value in source.__dict__.items():
        if name not in MODULE_HOOKS and name not in replacement.__dict__ and name not in skip:
            replacement.__dict__[name] = value
    for registry in ("_parameters", "_buffers", "_modules"):
        ours = replacement.__dict__[registry]
        for name, value in source.__dict__[registry].items():
            if name not in skip:
                ours.setdefault(name, value)


def standard_collection(collection: HashEmbeddingBagCollection) -> EmbeddingBagCollection:
    """The standard collection around the same parameters, without optimizers in backward and without indexes."""
    configs, meta = collection.embedding_bag_configs(), torch.device("meta")
    standard = EmbeddingBagCollection(configs, collection.is_weighted(), meta)
    bags, _ = copy_modules(collection.embedding_bags)
    assert isinstance(bags, nn.ModuleDict)
    release(bags)
    standard.embedding_bags = bags
    standard._device = collection.device
    carry_hooks(collection, standard)
    carry_over(collection, standard, skip=collection.own_names())
    return standard.train(collection.training)
