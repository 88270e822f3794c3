"""The names under which torch keeps hooks: one list, complete, and nobody has another."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

import recfx
from recfx.collections.copy_modules import carry_hooks
from recfx.runtime import base as hooks

PRODUCT = Path(recfx.__file__).parent


def test_the_list_is_torchs() -> None:
    not_hooks = {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
    assert set(vars(nn.Module())) - not_hooks == set(hooks.MODULE_HOOKS)
    assert {name for name in vars(nn.Module()) if hooks.holds_hooks(name)} == {
        name for name in hooks.MODULE_HOOKS if name != "_is_full_backward_hook"
    }


REGISTRATIONS = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_state_dict_post_hook",
    "register_state_dict_pre_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
]


@pytest.mark.parametrize("registration", REGISTRATIONS)
def test_what_is_asked_of_hooks(registration: str) -> None:
    module, replacement = nn.Linear(2, 2), nn.Linear(2, 2)
    assert not hooks.has_call_hooks(module)
    getattr(module, registration)(lambda *_: None)
    assert hooks.has_forward_hooks(module) is registration.startswith("register_forward")
    assert hooks.has_call_hooks(module) is registration.startswith(("register_forward", "register_full_backward"))
    assert bool(hooks.load_hooks(module)) is (registration == "register_load_state_dict_pre_hook")
    carry_hooks(module, replacement)
    for name in hooks.MODULE_HOOKS:
        carried, of_module = vars(replacement)[name], vars(module)[name]
        assert carried.keys() == of_module.keys() if isinstance(of_module, dict) else carried == of_module
        assert vars(replacement)[name] is not vars(module)[name] or not isinstance(vars(module)[name], dict)


def test_load_hooks_are_away_only_inside() -> None:
    module = nn.Linear(2, 2)
    module.register_load_state_dict_pre_hook(lambda *_: None)
    before = hooks.load_hooks(module)

    def fail() -> None:
        with hooks.without_load_hooks(module):
            assert not hooks.load_hooks(module)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert hooks.load_hooks(module) is before


def test_nobody_else_names_them() -> None:
    own = [name for name in hooks.MODULE_HOOKS if name != "_backward_hooks"]  # tensors have those as well
    files = {
        path.relative_to(PRODUCT).as_posix()
        for path in PRODUCT.rglob("*.py")
        if any(f'"{name}"' in (text := path.read_text()) or f".{name}" in text for name in own)
    }
    # The index is below runtime, and runs its own; a sharded collection has hooks of recfx.
    assert files == {"runtime/base.py", "hashing/storage.py", "collections/sharding/collection.py"}
