"""New module objects around the same parameters and buffers: how ``convert(inplace=False)`` leaves the original alone."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

_REGISTRIES = ("_parameters", "_buffers", "_modules")


def copy_shells(root: nn.Module) -> tuple[nn.Module, dict[int, nn.Module]]:
    """Copy every module object of ``root``, but none of its tensors.

    Training flags, hooks and other attributes of the copy are its own. Modules that plain attributes refer to (lists,
    dicts, bound methods) are the copies as well. ScriptModules are shared: they have no Python shell.

    Returns:
        the copy of ``root``, and the copy of every module by ``id`` of the original.
    """
    copies: dict[int, nn.Module] = {}
    for module in root.modules():
        copies[id(module)] = _empty_shell(module)
    for module in list(root.modules()):
        duplicate = copies[id(module)]
        if duplicate is module:
            continue
        for key, value in module.__dict__.items():
            duplicate.__dict__[key] = _copy_attribute(key, value, copies)
        if isinstance(module, OptimizedModule):
            duplicate._initialize()  # type: ignore[operator]  # compiles the copy, not the original
    return copies[id(root)], copies


def _empty_shell(module: nn.Module) -> nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        return module
    # Not __new__ of the class: a GraphModule's makes a class of its own for each instance.
    return object.__new__(type(module))


def _copy_attribute(key: str, value: Any, copies: dict[int, nn.Module]) -> Any:
    if key in ("_parameters", "_buffers"):
        return dict(value)
    if key == "_modules":
        return {name: None if child is None else copies[id(child)] for name, child in value.items()}
    if key.endswith("_hooks") or key.endswith("_hooks_with_kwargs") or key.endswith("_hooks_always_called"):
        return type(value)(value) if isinstance(value, dict) else value
    return _replace_modules(value, copies)


def _replace_modules(value: Any, copies: dict[int, nn.Module]) -> Any:
    """``value`` with every module that was copied replaced by its copy; containers are new, other objects the same."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        return types.MethodType(value.__func__, copies.get(id(value.__self__), value.__self__))
    if type(value) in (list, tuple, set):
        replaced = [_replace_modules(item, copies) for item in value]
        return type(value)(replaced)
    if isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
        duplicate = value.copy()
        for name, item in value.items():
            duplicate[name] = _replace_modules(item, copies)
        return duplicate
    return value
