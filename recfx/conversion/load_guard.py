"""``load_state_dict`` of a converted model: every saved index is checked before anything of the model is loaded.

torch loads module by module, so a damaged index would be found only after the modules before it have been loaded. A
hook on every module that holds a converted collection checks all of its collections first.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from recfx.collections.converted_collection import ConvertedCollection, converted_collections
from recfx.runtime.base import load_hooks

# The key among a module's hooks; torch's own keys are numbers. It is set once, and found again in copies and pickles.
_KEY: Any = "recfx_load_guard"


def guard_loading(model: nn.Module) -> None:
    """Let ``load_state_dict`` on ``model``, or on any module inside it, check the saved indexes first."""
    paths = {""}
    for path in converted_collections(model):
        parts = path.split(".")
        paths.update(".".join(parts[:depth]) for depth in range(len(parts)))
    for path in paths:
        module = model.get_submodule(path)
        if not isinstance(module, ConvertedCollection):  # these check their own tables anyway
            # A partial rather than a hook "with module", which holds its module by a weak reference that copies break.
            load_hooks(module)[_KEY] = functools.partial(_check_indexes, module)


def release_loading(model: nn.Module) -> None:
    """Remove the hooks."""
    for module in model.modules():
        load_hooks(module).pop(_KEY, None)


def _check_indexes(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    keys = list(load_hooks(module))
    if _KEY in keys and keys[-1] != _KEY:  # hooks after this one may still rename keys
        return
    collections = {
        f"{prefix}{path}.": collection
        for path, collection in module.named_modules()
        if isinstance(collection, ConvertedCollection) and not _rewritten(module, path)
    }
    for start, saved in _by_collection(state_dict, prefix, collections).items():
        collections[start].check_state(saved, start)


def _by_collection(state_dict: Mapping[str, Any], prefix: str, starts: Collection[str]) -> dict[str, dict[str, Any]]:
    """The saved state by the prefix of each collection, in one pass: a scan of all keys per collection would be
    quadratic.
    """
    saved: dict[str, dict[str, Any]] = {start: {} for start in starts}
    for key, value in state_dict.items():
        if not key.startswith(prefix):
            continue
        end = key.find(".", len(prefix))
        while end >= 0 and key[: end + 1] not in saved:
            end = key.find(".", end + 1)
        if end >= 0:
            saved[key[: end + 1]][key] = value
    return saved


def _rewritten(module: nn.Module, path: str) -> bool:
    """Whether a user's hook below ``module`` may still rename keys of a collection, which then checks itself later."""
    parts = path.split(".")
    inside = [module.get_submodule(".".join(parts[:depth])) for depth in range(1, len(parts) + 1)]
    return any(load_hooks(holder).keys() - {_KEY} for holder in inside)
