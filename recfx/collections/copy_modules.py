"""New modules around the same parameters and buffers, and what they take over of the modules that they stand for."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import UninitializedBuffer

from recfx.collections.collection import UnshardedCollection
from recfx.collections.compile_graph import COPIES_RUN_THE_SAME
from recfx.collections.find_references import References
from recfx.collections.kinds import kind_of
from recfx.collections.object_kinds import (
    REGISTRIES,
    Edge,
    attributes,
    empty_copy,
    hook_registries,
    hooks_of,
    is_atom,
    is_shared,
    set_attribute,
)
from recfx.collections.rewiring import Rewiring
from recfx.collections.table_holder import release
from recfx.errors import ConversionError
from recfx.runtime.hooks import MODULE_HOOKS, holds_hooks


def copy_modules(
    root: nn.Module, replacements: Mapping[int, nn.Module] = MappingProxyType({})
) -> tuple[nn.Module, dict[int, nn.Module]]:
    """Copy every module object of ``root``, but none of its tensors.

    The copy has its own training flags, hooks and other attributes. If plain attributes refer to a module of ``root``
    (through containers, helper objects, closures, bound methods, weak references), those of the copy refer to its copy.
    What ``is_shared`` names is not copied.

    Args:
        replacements: modules that take the place of some modules in the copy, by ``id`` of the original. They are taken
            as they are, except that plain attributes that come from the original also refer to the copies.

    Returns:
        the copy of ``root``, and the copy of every module by ``id`` of the original.
    """
    modules, replaced = _reached(root, replacements)
    copies: dict[int, nn.Module] = {id(module): empty_copy(module) for module in modules} | dict(replacements)
    for module in modules:
        if copies[id(module)] is not module:
            for key, value in module.__dict__.items():
                copies[id(module)].__dict__[key] = _copy_registry(key, value, copies)
    _redirect(modules, replaced, copies, inplace=False, containers=True)
    return copies[id(root)], copies


def refuse_fully_sharded(root: nn.Module, what_to_do: str) -> None:
    """Refuse modules on which ``fully_shard`` was called: their hooks gather the parameters of these very objects.

    Raises:
        ConversionError: ``fully_sharded``.
    """
    for path, module in root.named_modules():
        if isinstance(module, FSDPModule):
            raise ConversionError(
                "fully_shard was called on it, so that no other module object can use its parameters; but a copy of "
                "the modules is needed here.",
                reason="fully_sharded",
                module_path=path,
                what_to_do=what_to_do,
            )


def copy_with_tensors(root: nn.Module) -> nn.Module:
    """A deep copy of ``root``, whose functions, bound methods and weak references also refer to the copy.

    ``copy.deepcopy`` shares these, so its copy would call modules of the original. Converted collections of the copy
    run the graphs of the original, where ``copy.deepcopy`` runs the passes again.
    """
    uninitialized: Any = UninitializedBuffer
    modules = list(root.modules())
    memo: dict[int, Any] = {
        id(buffer): uninitialized(buffer.requires_grad, buffer.device, buffer.dtype)
        for module in modules
        for buffer in module._buffers.values()
        if isinstance(buffer, UninitializedBuffer)  # deepcopy cannot copy these
    }
    memo |= _empty_containers(modules)
    before = COPIES_RUN_THE_SAME.set(True)
    try:
        duplicate = copy.deepcopy(root, memo)
    finally:
        COPIES_RUN_THE_SAME.reset(before)
    copies = {id(module): memo[id(module)] for module in modules if id(module) in memo}
    _rewire(duplicate, copies, inplace=False)
    return duplicate


def _empty_containers(modules: list[nn.Module]) -> dict[int, Any]:
    """A new one for each empty container of a module, by ``id``: it has a dozen, at which deepcopy is slow."""
    return {
        id(value): type(value)()
        for module in modules
        for value in module.__dict__.values()
        if type(value) in (dict, OrderedDict, list, set) and not value
    }


def compiled_in_place(root: nn.Module) -> list[str]:
    """Paths of modules on which ``Module.compile()`` was called: their copies run uncompiled."""
    return [path for path, module in root.named_modules() if module._compiled_call_impl is not None]


def replace_in_place(root: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Put each replacement wherever ``root`` registers the original or refers to it by plain attributes."""
    _rewire(root, replacements, inplace=True)


def _rewire(root: nn.Module, replacements: Mapping[int, nn.Module], inplace: bool) -> None:
    modules, replaced = _reached(root, replacements)
    for module in modules:
        for name, child in module._modules.items():
            if child is not None and id(child) in replacements:
                module._modules[name] = replacements[id(child)]
    _redirect(modules, replaced, replacements, inplace, containers=False)


def _redirect(
    modules: list[nn.Module],
    replaced: list[nn.Module],
    others: Mapping[int, nn.Module],
    inplace: bool,
    containers: bool,
) -> None:
    """Let plain attributes and hooks of ``modules``, or of their copies, refer to other modules.

    Args:
        replaced: modules whose replacements have taken over attributes.
        others: the copy or replacement of each module, by ``id`` of the original.
        containers: also copy plain containers that refer to none of these modules.
    """
    owners = []
    for module in modules:
        edges = [(name, value) for name, value in attributes(module) if containers or not is_atom(value)]
        owners.append((module, others.get(id(module), module), edges))
    for module in replaced:
        replacement = others[id(module)]
        owners.append((replacement, replacement, list(_carried(module, replacement))))
    edges_of_owners = [("", owner, [*edges, *(hooks_of(owner) if inplace else ())]) for owner, _, edges in owners]
    references = References(others, edges_of_owners)
    rewiring = Rewiring(others, references, inplace)
    for owner, target, edges in owners:
        if target is owner and id(owner) in others:  # the copy shares it with the original
            continue
        for name, value in edges:
            if containers or rewiring.leads(value):
                set_attribute(target, name, rewiring.rewired(value))
        for _, hooks in hook_registries(target):  # the hooks stay where their handles expect them
            hooks.update({key: rewiring.rewired_hook(hook) for key, hook in hooks.items()})
    rewiring.finish()
    for _, target, _ in owners:
        if isinstance(target, OptimizedModule):
            target._initialize()  # compiles the copy, not the original


def _reached(root: nn.Module, replacements: Mapping[int, nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Every module of ``root`` that is not inside a replaced one, and those that are replaced."""
    reached: dict[int, nn.Module] = {}
    replaced: dict[int, nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) in replacements:
            replaced[id(module)] = module
        elif id(module) not in reached:
            reached[id(module)] = module
            if not is_shared(module):
                waiting += [child for child in module._modules.values() if child is not None]
    return list(reached.values()), list(replaced.values())


def _carried(original: nn.Module, replacement: nn.Module) -> Iterator[Edge]:
    """Plain attributes that a replacement took over from the original."""
    own: Any = getattr(replacement, "own_names", frozenset)()
    for name, value in attributes(replacement):
        if name in original.__dict__ and name not in own:
            yield name, value


def _copy_registry(key: str, value: Any, copies: Mapping[int, nn.Module]) -> Any:
    if key == "_modules":
        return {name: None if child is None else copies[id(child)] for name, child in value.items()}
    if key == "_compiled_call_impl":
        return None  # Module.compile() bound it to the original; see `compiled_in_place`
    is_hooks = holds_hooks(key) and isinstance(value, dict)
    return value.copy() if key in REGISTRIES or is_hooks else value


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
    standard.__class__ = getattr(type(collection), "_standard", kind.standard)  # a subclass of the user's
    tables, _ = copy_modules(kind.tables_of(collection))
    assert isinstance(tables, nn.ModuleDict)
    release(tables)
    setattr(standard, kind.tables, tables)
    standard._device = collection.device
    carry_hooks(collection, standard)
    carry_over(collection, standard, skip=collection.own_names())
    standard.train(collection.training)
    return standard
