"""TorchRec's wrappers around optimizers: what is inside, and the schedule of a warm-up, which is a state of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from recfx.checkpoint.names import mismatch
from recfx.collections.sharding.optimizer import ShardedFusedOptimizer
from recfx.optim.keyed_optimizer import FusedKeyedOptimizer

BUILD_AS_SAVED = "build the optimizer as it was built when saving, or load without optimizer=."
_FUSED = (ShardedFusedOptimizer, FusedKeyedOptimizer, EmptyFusedOptimizer)
_AROUND_ONE = (KeyedOptimizerWrapper, WarmupOptimizer, GradientClippingOptimizer)


def wrappers_around_one(optimizer: object) -> list[Any]:
    """The wrappers of a single optimizer, from the outermost to the innermost; not those that users derived."""
    return [each for _, each in _everything(optimizer) if type(each) in _AROUND_ONE]


def not_fused(optimizer: object) -> list[Any]:
    """The innermost optimizers, without the fused ones, which are saved with the model."""
    inside = (CombinedOptimizer, *_FUSED)
    return [
        each for _, each in _everything(optimizer) if not isinstance(each, inside) and type(each) not in _AROUND_ONE
    ]


def _everything(optimizer: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    yield place, optimizer
    if isinstance(optimizer, CombinedOptimizer):
        for number, (_, each) in enumerate(optimizer.optimizers):
            yield from _everything(each, f"{place}.{number}" if place else f"{number}")
    elif type(optimizer) in _AROUND_ONE:
        yield from _everything(optimizer._optimizer, f"{place}.inner" if place else "inner")


def _warm_ups(optimizer: object) -> dict[str, WarmupOptimizer]:
    return {place: each for place, each in _everything(optimizer) if isinstance(each, WarmupOptimizer)}


def warm_up_states(optimizer: object) -> dict[str, list[int]]:
    """How far each warm-up is: its number of steps and of the stage that it is in, by its place in ``optimizer``."""
    return {place: list(each._get_warmup_state()) for place, each in _warm_ups(optimizer).items()}


def plan_warm_ups(optimizer: object, saved: Mapping[str, Any]) -> list[tuple[WarmupOptimizer, list[int]]]:
    """The warm-ups of ``optimizer``, each with its saved state, for ``load_warm_ups``.

    Raises:
        CheckpointError: ``checkpoint_mismatch``.
    """
    found = _warm_ups(optimizer)
    if found.keys() != saved.keys():
        raise mismatch(
            f"warm-ups were saved at {sorted(saved)} of optimizer=, here they are at {sorted(found)}.",
            module_path="optimizer",
            what_to_do=BUILD_AS_SAVED,
        )
    for place, each in found.items():
        if saved[place][1] >= len(each._stages):
            raise mismatch(
                f"a warm-up was saved in its stage {saved[place][1]}, but here it has {len(each._stages)}.",
                module_path="optimizer",
                what_to_do=BUILD_AS_SAVED,
            )
    return [(each, saved[place]) for place, each in found.items()]


def load_warm_ups(planned: list[tuple[WarmupOptimizer, list[int]]]) -> None:
    """Set states and learning rates. From the innermost, as the outermost has the last word when they step."""
    for each, (steps, stage) in reversed(planned):
        each.state[each._warmup_param] = {"warmup": torch.tensor([steps, stage], dtype=torch.long, device="cpu")}
        each._set_lr(steps, stage)
