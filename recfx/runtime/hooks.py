"""What torch keeps on a module for hooks: the one list of the names, and what is asked of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""The attributes of modules that hold the hooks around ``forward``."""

MODULE_HOOKS = (
    *FORWARD_HOOKS,
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""What ``nn.Module`` keeps per instance for hooks; a module that replaces another would lose them."""

_SUFFIXES = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")


def holds_hooks(name: str) -> bool:
    """Whether a module's attribute of this name is a dict of hooks; modules of users may have more than torch's."""
    return name.endswith(_SUFFIXES)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether anything runs around the module's ``forward`` when the module is called."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_call_hooks(module: nn.Module) -> bool:
    """Whether anything runs around the module's ``forward`` or its backward."""
    return has_forward_hooks(module) or bool(module._backward_hooks or module._backward_pre_hooks)


def load_hooks(module: nn.Module) -> dict[Any, Callable[..., Any]]:
    """What runs before the module loads its part of a state, and may rename keys; by key, as torch keeps it."""
    return module._load_state_dict_pre_hooks


@contextlib.contextmanager
def without_load_hooks(module: nn.Module) -> Iterator[None]:
    """A context in which the module loads without its hooks: they have run already."""
    hooks = module.__dict__["_load_state_dict_pre_hooks"]
    module.__dict__["_load_state_dict_pre_hooks"] = {}
    try:
        yield
    finally:
        module.__dict__["_load_state_dict_pre_hooks"] = hooks
