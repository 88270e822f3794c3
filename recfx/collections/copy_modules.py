"""Copies of modules around the same parameters and buffers, and what a replacement takes over of the module before it.

A copy is what ``copy.deepcopy`` makes, except that tensors stand for themselves, as does what cannot be copied. So a
function, a weak reference or a generator of the copy still refers to the original; ``recfx.collections.replaced``
catches it if it calls an original collection.
"""

from __future__ import annotations

import copy
import functools
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from traceback import walk_tb
from types import MappingProxyType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import UninitializedBuffer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torchrec.modules.mc_modules import ManagedCollisionCollection, ManagedCollisionModule

from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.replaced import CatchingCall
from recfx.collections.table_holder import release
from recfx.errors import ConversionError
from recfx.runtime.base import MODULE_HOOKS, gets_its_module, holds_hooks

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
# Objects of these packages stand for themselves in a copy; the standard library's hold locks.
_PACKAGES = {"torch", "torchrec", "fbgemm_gpu", "recfx"}
_PACKAGES |= {"threading", "queue", "concurrent", "multiprocessing", "asyncio", "logging"}
_NOT_SEARCHED = _PACKAGES | {"numpy", "pandas", "pyarrow", "tensordict"} | sys.stdlib_module_names
_ATOMIC = (bool, int, float, str, type(None))  # deepcopy takes these as they are, but more slowly
_MOST_ATTEMPTS = 256
_PLAIN = (torch.Tensor, nn.Parameter)


def copy_modules(
    root: nn.Module, replacements: Mapping[int, nn.Module] = MappingProxyType({}), *, own_tensors: bool = False
) -> tuple[nn.Module, dict[int, nn.Module]]:
    """The copy of ``root``, and that of every module by ``id``: of what attributes hold, but of no tensors, or, with
    ``own_tensors``, of those that are not registered. ``replacements`` take the places of modules in the copy, by
    ``id`` of the original, and attributes that they have taken over refer to the copies.
    """
    reached = _reached(root, replacements)
    modules = [module for module in reached if id(module) not in replacements]
    copies: dict[int, nn.Module] = {id(module): _empty_copy(module) for module in modules} | dict(replacements)
    memo = _Memo(copies | {id(replacement): replacement for replacement in replacements.values()})
    memo.own_tensors = own_tensors
    for module in reached:
        memo |= _known_of(module, own_tensors)
    if not own_tensors:
        plain = [value for value in memo.values() if type(value) in _PLAIN and value.layout == torch.strided]
        storages = [tensor.untyped_storage() for tensor in plain]
        memo["torch"] = {storage._cdata: storage for storage in storages}  # where deepcopy looks for those of views
    made = [(module, duplicate) for module in reached if (duplicate := copies[id(module)]) is not module]
    for module, _ in made:
        for name, hooks in module.__dict__.items():
            if holds_hooks(name) and isinstance(hooks, dict):  # handles in the model remove them from the copy
                replaced = replacements.get(id(module))
                memo[id(hooks)] = hooks.copy() if replaced is None else replaced.__dict__.get(name, hooks)
    for module, duplicate in made:
        if id(module) in replacements:
            own: Any = getattr(duplicate, "own_names", frozenset)()
            for name, value in attributes(duplicate):
                if name in module.__dict__ and name not in own:
                    duplicate.__dict__[name] = _copied(value, memo)
        else:
            _fill(duplicate, module, memo)
    for module, duplicate in made:
        for name, hooks in duplicate.__dict__.items():
            if holds_hooks(name) and isinstance(hooks, dict):  # they stay where their handles expect them
                hooks.update({key: _copied(hook, memo) for key, hook in hooks.items()})
        if isinstance(duplicate, OptimizedModule) and id(module) not in replacements:
            duplicate._initialize()  # compiles the copy, not the original
    return copies[id(root)], copies


def _reached(root: nn.Module, replacements: Mapping[int, nn.Module]) -> list[nn.Module]:
    """Every module of ``root`` that is not inside one that is replaced, or shared with the original."""
    reached: dict[int, nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) not in reached:
            reached[id(module)] = module
            if id(module) not in replacements and not is_shared(module):
                waiting += [child for child in module._modules.values() if child is not None]
    return list(reached.values())


def _empty_copy(module: nn.Module) -> nn.Module:  # not by __new__ of GraphModule, which makes a class for each instance
    kind: Any = next((kind for kind in (dict, list, set) if isinstance(module, kind)), object)
    return module if is_shared(module) else kind.__new__(type(module))


def _fill(duplicate: nn.Module, module: nn.Module, memo: _Memo) -> None:
    contents: tuple[tuple[Any, Any], ...] = ((dict, dict.update), (list, list.extend), (set, set.update))
    for kind, add in contents:
        if isinstance(module, kind):
            add(duplicate, _copied(kind(module), memo))
    for name, value in module.__dict__.items():
        if name == "_compiled_call_impl":  # Module.compile() bound it to the original: `compile_dropped`
            if not isinstance(value, CatchingCall):
                continue
            value = CatchingCall(duplicate, value.caught)
        elif name == "_modules":
            value = {key: None if child is None else memo[id(child)] for key, child in value.items()}
        elif holds_hooks(name) and isinstance(value, dict):
            value = memo[id(value)]
        elif name in _REGISTRIES:
            value = value.copy()
        elif name not in MODULE_HOOKS and not isinstance(module, OptimizedModule):
            value = _copied(value, memo)
        duplicate.__dict__[name] = value


class _Memo(dict[Any, Any]):
    """The memo of ``copy.deepcopy``; see ``copy_modules`` for ``own_tensors``."""

    own_tensors: bool


def _known_of(module: nn.Module, own_tensors: bool) -> dict[int, Any]:
    """What a module and its attributes hold that stands for itself in a copy, by ``id``."""
    known = [*module._parameters.values(), *module._buffers.values()]
    for _, value in attributes(module):
        leaves = tree_leaves(value) if isinstance(value, _CONTAINERS) and value else (value,)
        tensors = [] if own_tensors else [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        known += [*tensors, *filter(_stands_for_itself, leaves)]
    return {id(value): value for value in known if value is not None}


def _copied(value: Any, memo: _Memo) -> Any:
    """What ``copy.deepcopy`` makes of an attribute. What must stand for itself, and is met only inside other objects,
    is put into ``memo``, and the attribute is copied again.
    """
    if type(value) in _ATOMIC or id(value) in memo:
        return memo.get(id(value), value)
    met = memo.setdefault(id(memo), [])  # deepcopy keeps there what it has copied, so that each id stays its own
    for _ in range(_MOST_ATTEMPTS):
        entries, before = len(memo), len(met)
        known: dict[int, Any] = {}
        try:
            duplicate = copy.deepcopy(value, memo)
            for item in met[before:]:
                known |= {key: part for key, part in _known_inside(item, memo).items() if memo.get(key) is not part}
        except Exception as error:  # at a lock, a generator, a process group
            calls = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code is copy.deepcopy.__code__]
            met.append(calls[-1].f_locals["x"])
            known = {id(met[-1]): met[-1]}
        if not known:
            return duplicate
        while len(memo) > entries:
            memo.popitem()
        memo |= known
    return value


def _known_inside(item: Any, memo: _Memo) -> dict[int, Any]:
    """What the copy of ``item`` should have taken for something, and its parts, by ``id``."""
    if isinstance(item, nn.Module):
        buffers = () if memo.own_tensors else item._buffers.values()
        return {id(buffer): buffer for buffer in buffers if buffer is not None}
    if isinstance(item, MethodType):
        owner = memo.get(id(item.__self__), item.__self__)
        return {} if type(owner) is type(item.__self__) else {id(item): _bound(item, owner)}
    if isinstance(item, torch.Tensor):
        # A ShardedTensor warns of every attribute that it is asked for.
        is_trained = isinstance(item, nn.Parameter) or (type(item) is torch.Tensor and item.requires_grad)
        return {id(item): item} if is_trained and not memo.own_tensors else {}
    return {id(item): item} if _stands_for_itself(item) else {}


def _stands_for_itself(value: Any) -> bool:
    kind: Any = type(value)
    if issubclass(kind, (*_CONTAINERS, nn.Module, torch.Tensor, torch.Generator, torch.device, RemovableHandle)):
        return False
    if kind.__module__ == "torch.storage" or gets_its_module(value):
        return False
    return issubclass(kind, torch.optim.Optimizer) or _package(kind) in _PACKAGES


def _is_searched(value: Any) -> bool:
    """Whether a replacement in place looks into the value."""
    kind: Any = type(value)
    if issubclass(kind, (dict, list, tuple, nn.Module, MethodType, functools.partial, SimpleNamespace, Namespace)):
        return True
    return not issubclass(kind, (torch.Tensor, type)) and _package(kind) not in _NOT_SEARCHED


@functools.lru_cache(maxsize=1024)
def _package(kind: Any) -> str:
    return str(kind.__module__).split(".")[0]


def _bound(method: MethodType, owner: Any) -> Any:
    """A method of another object, whose class may have its own of that name."""
    is_alike = type(owner) is type(method.__self__)
    return MethodType(method.__func__, owner) if is_alike else getattr(owner, method.__name__)


def is_shared(module: nn.Module) -> bool:
    """Whether a module is never copied: ScriptModules, and managed collisions, which keep what they have seen partly in
    buffers, that a copy would share, and partly in Python numbers.
    """
    return isinstance(module, (torch.jit.ScriptModule, ManagedCollisionCollection, ManagedCollisionModule))


def own_modules(root: nn.Module) -> list[nn.Module]:
    """The modules of a copy that it does not share with the original."""
    shared = {id(inside) for module in root.modules() if is_shared(module) for inside in module.modules()}
    return [module for module in root.modules() if id(module) not in shared]


def attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The plain attributes of a module, by name: no registries, no hooks, and nothing that ``torch.compile`` made."""
    if not isinstance(module, OptimizedModule):
        for name, value in module.__dict__.items():
            if name not in _REGISTRIES and not holds_hooks(name) and name != "_compiled_call_impl":
                yield name, value


def copy_with_tensors(root: nn.Module) -> nn.Module:
    """A deep copy of ``root``, also of the buffers of its lazy modules, which ``copy.deepcopy`` cannot copy."""
    uninitialized: Any = UninitializedBuffer
    buffers = [buffer for module in root.modules() for buffer in module._buffers.values()]
    lazy = [buffer for buffer in buffers if isinstance(buffer, UninitializedBuffer)]
    memo = {id(buffer): uninitialized(buffer.requires_grad, buffer.device, buffer.dtype) for buffer in lazy}
    return copy.deepcopy(root, memo)


def replace_in_place(root: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Put each replacement wherever ``root`` registers the original, or an attribute, list, tuple or dict holds it."""
    known: dict[int, Any] = dict(replacements)
    alive: list[Any] = []  # an id is unique only as long as its object is alive

    def replaced(value: Any) -> Any:
        if id(value) in known or not _is_searched(value):
            return known.get(id(value), value)
        known[id(value)] = value
        alive.append(value)
        if isinstance(value, MethodType):
            owner = replaced(value.__self__)
            return value if owner is value.__self__ else _bound(value, owner)
        if type(value) is functools.partial:
            keywords = {name: replaced(item) for name, item in value.keywords.items()}
            return functools.partial(replaced(value.func), *map(replaced, value.args), **keywords)
        if isinstance(value, tuple):
            items = list(map(replaced, value))
            if any(item is not before for item, before in zip(items, value, strict=True)):
                known[id(value)] = value._make(items) if hasattr(value, "_make") else type(value)(items)
        elif isinstance(value, (list, dict)):
            for place, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if (new := replaced(item)) is not item:
                    value[place] = new
        for name, item in list(getattr(value, "__dict__", {}).items()):
            value.__dict__[name] = replaced(item)
        return known[id(value)]

    replaced(root)


def refuse_fully_sharded(root: nn.Module, what_to_do: str) -> None:
    """Refuse modules on which ``fully_shard`` was called: their hooks gather the parameters of these very objects."""
    for path, module in root.named_modules():
        if isinstance(module, FSDPModule):
            raise ConversionError(
                "fully_shard was called on it, so that no other module object can use its parameters; but a copy of "
                "the modules is needed here.",
                reason="fully_sharded",
                module_path=path,
                what_to_do=what_to_do,
            )


OWN_HOOK: Any = "recfx"
"""The key of a hook of recfx's own, which stays on its module; the keys of torch are numbers."""


def carry_hooks(source: nn.Module, replacement: nn.Module, *, for_good: bool = False) -> None:
    """Give ``replacement`` the hooks of ``source``, which run after its own of recfx; with ``for_good``, the dicts
    themselves, so that the handles of hooks still remove them.
    """
    for name in MODULE_HOOKS:
        hooks, own = source.__dict__.get(name), replacement.__dict__.get(name)
        if isinstance(hooks, dict):
            kept = {OWN_HOOK: own[OWN_HOOK]} if isinstance(own, dict) and OWN_HOOK in own else {}
            for key, hook in hooks.items():
                if key != OWN_HOOK:
                    kept[key] = type(hook)(hook.hook, replacement) if gets_its_module(hook) else hook
            hooks = hooks if for_good else hooks.copy()
            hooks.clear()
            hooks.update(kept)
        replacement.__dict__[name] = hooks


def carry_over(source: nn.Module, replacement: nn.Module, skip: frozenset[str] = frozenset()) -> None:
    """Give ``replacement`` the attributes that the user or a subclass put on ``source``, except hooks."""
    for name, value in source.__dict__.items():
        if name not in MODULE_HOOKS and name not in replacement.__dict__ and name not in skip:
            replacement.__dict__[name] = value
    for registry in _REGISTRIES:
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
