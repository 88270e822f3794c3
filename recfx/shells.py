"""New modules around the same parameters and buffers: how ``convert(inplace=False)`` leaves the original alone."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_HOOK_SUFFIXES = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def copy_shells(
    root: nn.Module, replacements: Mapping[int, nn.Module] = MappingProxyType({})
) -> tuple[nn.Module, dict[int, nn.Module]]:
    """Copy every module object of ``root``, but none of its tensors.

    Training flags, hooks and other attributes of the copy are its own. Modules that plain attributes refer to (lists,
    dicts, bound methods) are the copies as well. ScriptModules are shared: they have no Python shell.

    Args:
        root: the module to copy.
        replacements: what stands in the copy for some modules, by ``id`` of the original; taken as it is.

    Returns:
        the copy of ``root``, and the copy of every module by ``id`` of the original.
    """
    modules = _reached(root, replacements)
    copies: dict[int, nn.Module] = {id(module): _empty_shell(module) for module in modules} | dict(replacements)
    for module in modules:
        duplicate = copies[id(module)]
        if duplicate is not module:
            for key, value in module.__dict__.items():
                duplicate.__dict__[key] = _copy_attribute(key, value, copies)
    for module in modules:
        if isinstance(module, OptimizedModule):
            copies[id(module)]._initialize()  # type: ignore[operator]  # compiles the copy, not the original
    for replacement in replacements.values():
        rebind_hooks(replacement, copies)
    return copies[id(root)], copies


def rebind_hooks(module: nn.Module, copies: Mapping[int, nn.Module]) -> None:
    """Let hooks that are methods of a copied module run on its copy."""
    for key, value in module.__dict__.items():
        if key.endswith(_HOOK_SUFFIXES) and isinstance(value, dict):
            module.__dict__[key] = _replace_modules(value, copies)


def compiled_in_place(root: nn.Module) -> list[str]:
    """Paths of modules on which ``Module.compile()`` was called: their copies run uncompiled."""
    return [path for path, module in root.named_modules() if module._compiled_call_impl is not None]


def replace_in_place(root: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Put each replacement wherever ``root`` registers the original, or refers to it in a plain attribute."""
    copies = dict(replacements)
    for module in _reached(root, replacements):
        for key, value in list(module.__dict__.items()):
            if key == "_modules":
                for name, child in value.items():
                    if child is not None and id(child) in copies:
                        value[name] = copies[id(child)]
            elif key not in _REGISTRIES and not key.endswith(_HOOK_SUFFIXES) and _refers(value, copies):
                module.__dict__[key] = _replace_modules(value, copies)
        if isinstance(module, OptimizedModule):
            module._initialize()


def _reached(root: nn.Module, replacements: Mapping[int, nn.Module]) -> list[nn.Module]:
    """Every module of ``root`` that is not inside a replaced one."""
    reached: dict[int, nn.Module] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if id(module) in reached or id(module) in replacements:
            continue
        reached[id(module)] = module
        waiting += [child for child in module._modules.values() if child is not None]
    return list(reached.values())


def _refers(value: Any, copies: Mapping[int, nn.Module]) -> bool:
    if isinstance(value, nn.Module):
        return id(value) in copies
    if isinstance(value, types.MethodType):
        return id(value.__self__) in copies
    if type(value) in (list, tuple, set):
        return any(_refers(item, copies) for item in value)
    return isinstance(value, dict) and any(_refers(item, copies) for item in value.values())


def _empty_shell(module: nn.Module) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        return module
    # Not __new__ of the class: a GraphModule's makes a class of its own for each instance.
    return object.__new__(type(module))


def _copy_attribute(key: str, value: Any, copies: Mapping[int, nn.Module]) -> Any:
    if key in ("_parameters", "_buffers"):
        return dict(value)
    if key == "_modules":
        return {name: None if child is None else copies[id(child)] for name, child in value.items()}
    if key == "_compiled_call_impl":
        return None  # Module.compile() bound it to the original; see `compiled_in_place`
    return _replace_modules(value, copies)


def _replace_modules(value: Any, copies: Mapping[int, nn.Module]) -> Any:
    """``value`` with every module that was copied replaced by its copy; containers are new, other objects the same."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        return types.MethodType(value.__func__, copies.get(id(value.__self__), value.__self__))
    if isinstance(value, functools.partial):
        arguments = [_replace_modules(item, copies) for item in value.args]
        keywords = {name: _replace_modules(item, copies) for name, item in value.keywords.items()}
        return functools.partial(_replace_modules(value.func, copies), *arguments, **keywords)
    if type(value) in (list, tuple, set):
        replaced = [_replace_modules(item, copies) for item in value]
        return type(value)(replaced)
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        duplicate = value.copy()
        for name, item in value.items():
            duplicate[name] = _replace_modules(item, copies)
        return duplicate
    return value
