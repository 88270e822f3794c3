"""What ``optimizer=`` may be: a ``torch.optim`` optimizer, also inside TorchRec's wrappers and beside fused ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from recfx.checkpoint.contents import mismatch, refused_as
from recfx.collections.optimizer import FusedKeyedOptimizer
from recfx.errors import CheckpointError, type_of

_FUSED = (FusedKeyedOptimizer, EmptyFusedOptimizer)
_AROUND_ONE = (KeyedOptimizerWrapper, WarmupOptimizer, GradientClippingOptimizer)
_ONE = (
    "pass one torch.optim optimizer, with a group of parameters for each that there was: "
    "Adam([{'params': a}, {'params': b, 'lr': 0.1}]). Fused optimizers are saved with the model, and so is a "
    "learning-rate scheduler that is the extra state of a module: see class Kept in recfx/checkpoint/README.md."
)


def _unwrapped(optimizer: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The optimizer, and all optimizers inside it, from the outermost to the innermost, with their places."""
    yield place, optimizer
    if isinstance(optimizer, CombinedOptimizer):
        for number, (_, inner) in enumerate(optimizer.optimizers):
            yield from _unwrapped(inner, f"{place}.{number}" if place else f"{number}")
    elif type(optimizer) in _AROUND_ONE:  # not in classes that users derived from them
        yield from _unwrapped(optimizer._optimizer, f"{place}.inner" if place else "inner")


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """The ``torch.optim`` optimizer inside; None if there are only fused ones, which are saved with the model."""
    innermost = [inner for _, inner in _unwrapped(optimizer) if type(inner) not in _AROUND_ONE]
    ordinary = [inner for inner in innermost if not isinstance(inner, (CombinedOptimizer, *_FUSED))]
    if len(ordinary) > 1:
        raise not_supported(f"optimizer= has {len(ordinary)} optimizers that are not fused.", _ONE)
    for inner in ordinary:
        if isinstance(inner, torch.optim.Optimizer) and not isinstance(inner, KeyedOptimizer):
            return inner
        raise not_supported(f"optimizer= is {type_of(inner)}, which is not supported.", _ONE)
    return None


def not_supported(message: str, what_to_do: str) -> CheckpointError:
    """The error for an optimizer that cannot be saved or loaded."""
    return CheckpointError(message, reason="optimizer_not_supported", what_to_do=what_to_do)


def other_optimizer(
    message: str, what_to_do: str = "build the optimizer as it was built when saving, or load without optimizer=."
) -> CheckpointError:
    """The error for an optimizer that is not the one that was saved."""
    return mismatch(message, module_path="optimizer", what_to_do=what_to_do)


def load_state(optimizer: Any, state: dict[str, Any], undo: list[Callable[[], None]]) -> None:
    """``load_state_dict`` of the optimizer inside; ``undo`` gets what undoes it."""
    inner: Any = unwrap_optimizer(optimizer)
    wrappers = [wrapper for _, wrapper in _unwrapped(optimizer) if type(wrapper) in _AROUND_ONE]
    undo += [functools.partial(_set, part, part.state, part.param_groups) for part in (inner, *wrappers)]
    with refused_as("the optimizer", "optimizer"):
        inner.load_state_dict(state)
    for wrapper in reversed(wrappers):  # torch has replaced the objects that they know
        _set(wrapper, wrapper._optimizer.state, wrapper._optimizer.param_groups)


def _set(optimizer: Any, state: Any, groups: Any) -> None:
    optimizer.state, optimizer.param_groups = state, groups


def warm_ups(optimizer: object) -> list[tuple[str, WarmupOptimizer, list[int]]]:
    """TorchRec's warm-ups, each with its place and how far it is: its number of steps, and of its stage."""
    parts = [(place, part) for place, part in _unwrapped(optimizer) if isinstance(part, WarmupOptimizer)]
    return [(place, warm_up, list(warm_up._get_warmup_state())) for place, warm_up in parts]


def plan_warm_ups(optimizer: object, saved: Mapping[str, list[int]]) -> Callable[[], None]:
    """A function that sets the saved states of warm-ups, and learning rates by them."""
    here = warm_ups(optimizer)
    if {place for place, _, _ in here} != saved.keys():
        places = sorted(place for place, _, _ in here)
        raise other_optimizer(f"warm-ups were saved at {sorted(saved)} of optimizer=, here they are at {places}.")
    for place, warm_up, _ in here:
        stage, stages = saved[place][1], len(warm_up._stages)
        if stage >= stages:
            raise other_optimizer(f"a warm-up was saved in its stage {stage}, but here it has {stages}.")

    def load() -> None:
        for place, warm_up, _ in reversed(here):  # the outermost has the last word, as when they step
            state = torch.tensor(saved[place], dtype=torch.long, device="cpu")
            warm_up.state[warm_up._warmup_param] = {"warmup": state}
            warm_up._set_lr(*saved[place])

    return load
