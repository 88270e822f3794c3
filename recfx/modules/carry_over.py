"""What users hang on a module goes over to the module that takes its place."""

from __future__ import annotations

from torch import nn

# What nn.Module keeps per instance for hooks; a replaced module would lose them.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def carry_hooks(source: nn.Module, replacement: nn.Module) -> None:
    """Give ``replacement`` the hooks of ``source``."""
    for name in _HOOKS:
        value = source.__dict__.get(name)
        replacement.__dict__[name] = value.copy() if isinstance(value, dict) else value


def carry_over(source: nn.Module, replacement: nn.Module, skip: frozenset[str] = frozenset()) -> None:
    """Give ``replacement`` what the user or a subclass hung on ``source``, except hooks."""
    for name, value in source.__dict__.items():
        if name not in _HOOKS and name not in replacement.__dict__ and name not in skip:
            replacement.__dict__[name] = value
    for registry in ("_parameters", "_buffers", "_modules"):
        ours = replacement.__dict__[registry]
        for name, value in source.__dict__[registry].items():
            if name not in skip:
                ours.setdefault(name, value)
