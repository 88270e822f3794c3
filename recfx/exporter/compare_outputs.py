"""Whether an exported program computes what the model does: both run on the same calls, in eval mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recfx.tracing.randomness import fixed_randomness
from recfx.tracing.sample import Sample
from recfx.verification.compare_tensors import Difference, compare_tensors, largest_difference

_SEED = 20_261_122


def outputs_of(run: Callable[..., Any], sample: Sample) -> list[tuple[str, torch.Tensor]]:
    """The output tensors of one call, each with the place at which it stands; from fixed random numbers."""
    return list(tensors_at("output", run_model(run, sample)))


def run_model(run: Callable[..., Any], sample: Sample) -> Any:
    """What one call returns, from fixed random numbers."""
    call = sample.clone()
    with torch.no_grad(), fixed_randomness(_SEED):
        return run(*call.args, **call.kwargs)


def first_difference(
    wanted: list[tuple[str, torch.Tensor]],
    found: list[tuple[str, torch.Tensor]],
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> Difference | None:
    """The first output that differs; None if all are close."""
    if len(wanted) != len(found):
        return Difference("outputs", f"{len(found)} tensors instead of {len(wanted)}")
    for (place, expected), (_, actual) in zip(wanted, found, strict=True):
        difference = compare_tensors(place, expected, actual, rtol, atol)
        if difference is not None:
            return difference
    return None


def largest_output_difference(wanted: list[tuple[str, torch.Tensor]], found: list[tuple[str, torch.Tensor]]) -> float:
    """The largest absolute difference of any output."""
    pairs = zip(wanted, found, strict=True)
    return max((largest_difference(expected, actual) for (_, expected), (_, actual) in pairs), default=0.0)


def tensors_at(place: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of an output, and where it stands; dataclasses and tuples count alike, dicts go by their keys."""
    if isinstance(value, LazyAwaitable):
        value = value.wait()
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, KeyedTensor):
        yield f"{place}.values", value.values()
    elif isinstance(value, (KeyedJaggedTensor, JaggedTensor)):
        yield f"{place}.values", value.values()
        yield f"{place}.lengths", value.lengths()
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from tensors_at(f"{place}.{key}", value[key])
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from tensors_at(f"{place}.{number}", item)
    elif isinstance(value, torch.ScriptObject):
        yield from _of_script_object(place, value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_at(f"{place}.{field.name}", getattr(value, field.name))


def _of_script_object(place: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A KeyedTensor or a KJT that a script returns has no Python class."""
    yield f"{place}.values", value.values()
    if hasattr(value, "lengths"):
        yield f"{place}.lengths", value.lengths()
