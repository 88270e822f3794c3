"""Carries over what users attach to a module to the module that takes its place."""

from __future__ import annotations

from torch import nn

from recfx.collections.collection import UnshardedCollection
from recfx.collections.copy_modules import copy_modules
from recfx.collections.kinds import kind_of
from recfx.collections.table_holder import release
from recfx.runtime.hooks import MODULE_HOOKS


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


def standard_collection(collection: UnshardedCollection) -> nn.Module:
    """The standard collection around the same parameters, without optimizers in backward and without indexes."""
    kind = kind_of(collection)
    standard = kind.empty_like(collection)
    tables, _ = copy_modules(kind.tables_of(collection))
    assert isinstance(tables, nn.ModuleDict)
    release(tables)
    setattr(standard, kind.tables, tables)
    standard._device = collection.device
    carry_hooks(collection, standard)
    carry_over(collection, standard, skip=collection.own_names())
    standard.train(collection.training)
    return standard
