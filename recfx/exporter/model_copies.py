"""Copies of a model that may be run: nothing that a forward changes is the user's. Files are made on the host:
collections that are sharded or on another device are rebuilt there around whole tables.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.utils import parametrize

from recfx.checkpoint.load import load_part
from recfx.collections.collection import UnshardedCollection, unsharded_collections
from recfx.collections.converted_collection import ConvertedCollection, converted_collections
from recfx.collections.copy_modules import copy_modules, copy_with_tensors, own_modules
from recfx.collections.hash_collections import CONVERTED_CLASSES
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.gather import WholeTable
from recfx.conversion.convert import convert
from recfx.errors import CheckpointError
from recfx.exporter.state import Unchanged, storage_of, tensors_of_modules
from recfx.models.nests import change_leaves
from recfx.models.sample import Sample, fixed_randomness
from recfx.runtime.base import FORWARD_HOOKS


def fresh_copy(
    model: nn.Module, replacements: Mapping[int, nn.Module] = MappingProxyType({})
) -> tuple[nn.Module, dict[int, nn.Module]]:
    """New modules in eval mode around the same parameters, with buffers of their own; collections share everything, as
    do buffers that share their memory with another tensor. ``replacements`` take the place of some modules, by ``id``.
    Returns also the copy of each module by ``id``.
    """
    copy, copies = copy_modules(model, replacements)
    modes = [(module, module.training) for module in set(copy.modules()) - set(own_modules(copy))]
    with Unchanged(copy):  # parameters are the user's
        copy.eval()  # with what the user's modules make of it
    for module, training in modes:  # shared with the user's model
        module.training = training
    shared = {id(part) for module in converted_collections(copy).values() for part in module.modules()}
    shared |= {id(part) for module in replacements.values() for part in module.modules()}
    sharing: dict[int | None, set[int]] = {}
    tables = [tensor for module in converted_collections(copy).values() for tensor in module.parameters()]
    for tensor in [*(tensor for _, tensor in tensors_of_modules(copy)), *tables]:
        sharing.setdefault(storage_of(tensor), set()).add(id(tensor))
    cloned: dict[int, torch.Tensor] = {}
    for module in own_modules(copy):
        module.__dict__.pop("_compiled_call_impl", None)  # see `catch_calls`; TorchScript would compile it
        if id(module) in shared:
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and (storage_of(buffer) is None or len(sharing[storage_of(buffer)]) == 1):
                module._buffers[name] = cloned.setdefault(id(buffer), buffer.detach().clone())
    return copy, copies


def own_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a model that do not belong to its collections."""
    shared = {id(buffer) for module in converted_collections(model).values() for buffer in module.buffers()}
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in shared}


@contextlib.contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """A context after which the indexes' counts are as they were before it."""
    collections = unsharded_collections(model).values()
    counts = [each.index(name).eval_counts for each in collections for name in each.hash_indexes]
    before = [count.clone() for count in counts]
    try:
        yield
    finally:
        for count, value in zip(counts, before, strict=True):
            count.copy_(value)


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


def device_of(model: nn.Module) -> torch.device:
    """Where the tables of a converted model are."""
    devices = (collection.store.device for collection in converted_collections(model).values())
    return next(devices, torch.device("cpu"))


def on_host(
    model: nn.Module, call: Sample, gathered: Mapping[str, Mapping[str, WholeTable]] = MappingProxyType({})
) -> tuple[nn.Module, Sample]:
    """The model and the call on the host, around the ``gathered`` tables of sharded collections, by path and name."""
    collections = converted_collections(model)
    tables = dict(gathered)
    for path, collection in unsharded_collections(model).items():
        if collection.store.device.type not in ("cpu", "meta"):
            tables[path] = moved = dict[str, WholeTable]()
            for spec in collection.tables:
                state = collection.index(spec.name).state_dict() if spec.has_index else {}
                index = {name: value.cpu() for name, value in state.items()}
                moved[spec.name] = WholeTable(collection.weight(spec.name).detach().cpu(), index, None, False)
    if not tables:
        return model, call
    replacements = {id(collections[path]): _with_tables(path, collections[path], tables[path]) for path in tables}
    is_on_host, host = device_of(model).type == "cpu", torch.device("cpu")
    model = copy_modules(model, replacements)[0]
    if is_on_host:
        return model, call
    detach_parameters(own_modules(model))  # because `to` writes into parameters
    args, kwargs = change_leaves((call.args, call.kwargs), lambda leaf: leaf.to(host) if hasattr(leaf, "to") else leaf)
    return model.to(host), Sample(*args, **kwargs)


def _with_tables(path: str, collection: ConvertedCollection, tables: Mapping[str, WholeTable]) -> UnshardedCollection:
    """An unsharded collection on the host with the settings and forward hooks of this one, in eval mode."""
    kind = kind_of(collection)
    specs = tuple(replace(spec, dtype=tables[spec.name].weight.dtype) for spec in collection.tables)
    made = CONVERTED_CLASSES[kind].from_tables(
        collection,
        specs,
        nn.ModuleDict({spec.name: kind.table_around(tables[spec.name].weight, spec.pooling) for spec in specs}),
        "cpu",
        path,
        passes=collection.passes,
    )
    for name in made.hash_indexes:
        made.index(name).load_state_dict(tables[name].index)
    for hooks in FORWARD_HOOKS:
        made.__dict__[hooks] = collection.__dict__[hooks].copy()
    return made.eval()


def loaded_copy(model: nn.Module, directory: str | os.PathLike[str], submodule: str) -> nn.Module:
    """A converted copy of a model, possibly on meta, with what ``save_checkpoint`` has saved of it at ``submodule``."""
    copy = copy_with_tensors(convert(model, verify=False, on_unsupported="keep"))
    saved = copy.state_dict()
    unsaved = [name for name, buffer in own_buffers(copy).items() if buffer.is_meta and name not in saved]
    allocated: dict[int, torch.Tensor] = {}  # modules may share tensors

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        return allocated.setdefault(id(tensor), torch.empty_like(tensor, device="cpu"))

    collections = unsharded_collections(copy).values()
    on_meta = [collection for collection in collections if any(weight.is_meta for weight in collection.parameters())]
    copy._apply(allocate)
    with fixed_randomness(0):
        for collection in on_meta:
            collection.reset_parameters()  # a table may have more rows than were saved
    load_part(copy, directory, submodule)
    if unsaved:
        raise CheckpointError(
            "the tensor is on meta, and is not saved.",
            reason="model_on_meta",
            module_path=unsaved[0],
            what_to_do="build the model with only its tables on meta.",
        )
    return copy
