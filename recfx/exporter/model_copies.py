"""Copies of a model that may be run: nothing that a forward changes is the user's.

In some copies, small collections stand in for tables that this process does not hold, or that are on another device.
Their rows are not the model's, so no output is; but every id has one, and shapes, keys and dtypes are right, so what
the model computes from them can be traced and compared with itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_classes import converted_class
from recfx.collections.converted_collection import ConvertedCollection, converted_collections
from recfx.collections.copy_modules import copy_modules, own_modules
from recfx.collections.kinds import kind_of
from recfx.discovery.discover import set_mode
from recfx.discovery.sample import Sample, change_leaves
from recfx.errors import ExportError, told_by
from recfx.hashing import HashConfig
from recfx.ir.tables import TableSpec
from recfx.runtime.hooks import MODULE_HOOKS


def fresh_copy(
    model: nn.Module, replacements: Mapping[int, nn.Module] = MappingProxyType({})
) -> tuple[nn.Module, dict[int, nn.Module]]:
    """New modules in eval mode around the same parameters, with buffers of their own; collections share everything.

    ``replacements`` take the place of some modules, by ``id``. Returns also the copy of each module by ``id``.
    """
    copy, copies = copy_modules(model, replacements)
    set_mode(copy, False)
    shared = {id(part) for module in _collections(copy) for part in module.modules()}
    shared |= {id(part) for module in replacements.values() for part in module.modules()}
    cloned: dict[int, torch.Tensor] = {}
    for module in own_modules(copy):
        if id(module) in shared:
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = cloned.setdefault(id(buffer), buffer.detach().clone())
        for name, value in list(module.__dict__.items()):
            if isinstance(value, torch.Tensor):
                module.__dict__[name] = value.detach().clone()
    return copy, copies


def restore_buffers(copy: nn.Module, model: nn.Module) -> None:
    """Set the buffers of a copy to the values of the model's."""
    before = dict(model.named_buffers())
    for name, buffer in own_buffers(copy).items():
        if name in before and buffer.shape == before[name].shape:
            buffer.copy_(before[name])


@contextlib.contextmanager
def sample_failed() -> Iterator[None]:
    """A context in which the user's model runs: whatever its code raises is about the sample.

    Raises:
        ExportError: ``sample_failed``.
    """
    try:
        yield
    except Exception as error:
        message, what_to_do = told_by(error, "pass one call of the model that works in eval mode.")
        raise ExportError(
            f"the model cannot be called with the sample: {message}",
            reason="sample_failed",
            what_to_do=what_to_do,
        ) from error


def own_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a model that do not belong to its collections."""
    shared = {id(buffer) for module in _collections(model) for buffer in module.buffers()}
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in shared}


@contextlib.contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """A context after which the indexes' counts are as they were before it."""
    counts = [index.eval_counts for module in _collections(model) for index in _indexes(module)]
    before = [count.clone() for count in counts]
    try:
        yield
    finally:
        for count, value in zip(counts, before, strict=True):
            count.copy_(value)


def strip_hooks(modules: list[nn.Module]) -> None:
    """Remove all hooks of these modules."""
    for module in modules:
        for name in MODULE_HOOKS:
            if isinstance(module.__dict__.get(name), dict):
                module.__dict__[name] = type(module.__dict__[name])()


def fold_parametrizations(model: nn.Module) -> None:
    """Give the modules of a copy the values that their parametrizations compute, which TorchScript cannot compile."""
    for module in own_modules(model):
        if parametrize.is_parametrized(module):
            with torch.no_grad():
                values = {name: getattr(module, name).clone() for name in module.parametrizations}  # type: ignore[union-attr]
            del module._modules["parametrizations"]
            module.__class__ = type(module).__bases__[0]  # from which torch made a class for this module alone
            for name, value in values.items():
                module.register_parameter(name, nn.Parameter(value, requires_grad=False))


def detach_parameters(modules: list[nn.Module]) -> None:
    """Give these modules parameters that share their memory with the ones they have, but need no gradients."""
    detached: dict[int, nn.Parameter] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                shared = detached.setdefault(id(parameter), nn.Parameter(parameter.detach(), requires_grad=False))
                module._parameters[name] = shared


def _collections(model: nn.Module) -> list[ConvertedCollection]:
    return [module for module in model.modules() if isinstance(module, ConvertedCollection)]


def _indexes(collection: ConvertedCollection) -> list[Any]:
    return [collection.index(name) for name in collection.hash_indexes]


_ROWS = 16
_HASHING = HashConfig.raw_ids(rows=_ROWS, unseen="share")


def with_stand_ins(model: nn.Module, collections: Mapping[str, ConvertedCollection]) -> nn.Module:
    """New modules around the same parameters, in which small collections take the place of ``collections``."""
    stand_ins = {
        id(old): with_tables(path, old, [hashed_spec(spec, _ROWS, _HASHING) for spec in old.tables])
        for path, old in collections.items()
    }
    return copy_modules(model, stand_ins)[0]


def hashed_spec(spec: TableSpec, rows: int, hashing: HashConfig) -> TableSpec:
    """The table with so many rows, hashed in this way."""
    return replace(spec, num_embeddings=rows, hashing=hashing.resolve(rows, False, spec.name), custom_init_fn=False)


def with_tables(path: str, collection: ConvertedCollection, specs: Iterable[TableSpec]) -> UnshardedCollection:
    """A collection like this one in eval mode, with new tables on the CPU in the place of its own."""
    specs, kind = tuple(specs), kind_of(collection)
    tables = {
        spec.name: kind.holder(spec.num_embeddings, spec.embedding_dim, dtype=spec.dtype, device="cpu")
        for spec in specs
    }
    made = converted_class(kind).from_tables(
        kind.configs_of(collection),
        specs,
        nn.ModuleDict(tables),
        collection.is_weighted(),
        "cpu",
        path,
        "auto",
        None,
        settings=kind.settings_of(collection),
    )
    made.eval()
    return made


def device_of(model: nn.Module) -> torch.device:
    """Where the tables of a converted model are."""
    devices = (collection.store.device for collection in converted_collections(model).values())
    return next(devices, torch.device("cpu"))


def on_host(model: nn.Module, call: Sample, collections: Mapping[str, ConvertedCollection]) -> tuple[nn.Module, Sample]:
    """The model with small collections in the place of ``collections``, and the call: both on the host."""
    small, host = with_stand_ins(model, collections), torch.device("cpu")
    if device_of(model).type == "cpu":
        return small, call
    detach_parameters(own_modules(small))  # because `to` writes into parameters
    moved = change_leaves((call.args, call.kwargs), lambda leaf: leaf.to(host) if hasattr(leaf, "to") else leaf)
    return small.to(host), Sample(*moved[0], **moved[1])
