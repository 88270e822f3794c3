"""Run two models on the same call and say where they first differ. On copies; the caller's RNG is untouched."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from recfx.sample import Sample, tensors_of


@dataclass(frozen=True)
class Difference:
    """Where two runs part.

    Args:
        where: which value.
        message: how they differ.
    """

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@contextlib.contextmanager
def fixed_randomness(seed: int = 0) -> Iterator[None]:
    """Seed torch, numpy and Python inside; give back their states after."""
    python, array = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed)
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)


def compare_tensors(
    where: str, expected: torch.Tensor, actual: torch.Tensor, rtol: float, atol: float
) -> Difference | None:
    """None where shape and dtype are equal and the values close."""
    if expected.shape != actual.shape:
        return Difference(where, f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if expected.dtype != actual.dtype:
        return Difference(where, f"dtype {actual.dtype} instead of {expected.dtype}")
    if torch.allclose(expected, actual, rtol=rtol, atol=atol, equal_nan=True):
        return None
    return Difference(where, f"largest difference {largest_difference(expected, actual):.3g}")


def largest_difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """0 for empty tensors; inf where one has a NaN or the shapes differ."""
    if expected.shape != actual.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    difference = (expected.double() - actual.double()).abs().nan_to_num(nan=float("inf"))
    both_nan = expected.isnan() & actual.isnan() if expected.is_floating_point() else None
    if both_nan is not None:
        difference = difference.masked_fill(both_nan, 0.0)
    return float(difference.max())


def compare_forward(expected: nn.Module, actual: nn.Module, sample: Sample, training: bool) -> Difference | None:
    """Compare the outputs of two models at two batch sizes in one mode.

    Returns:
        None if they agree; a call on which ``expected`` itself fails is not compared.
    """
    for call in (sample, sample.resized()):
        if call is None:
            continue
        try:
            wanted = _outputs(expected, call, training)
        except Exception:  # the model's own failure: nothing to compare with
            continue
        try:
            found = _outputs(actual, call, training)
        except Exception as error:
            return Difference("forward", f"raises {type(error).__name__}: {error}")
        if len(wanted) != len(found):
            return Difference("outputs", f"{len(found)} tensors instead of {len(wanted)}")
        for position, (before, after) in enumerate(zip(wanted, found, strict=True)):
            difference = compare_tensors(f"output {position}", before, after, rtol=1e-5, atol=1e-6)
            if difference is None and before.requires_grad != after.requires_grad:
                difference = Difference(f"output {position}", f"requires_grad is {after.requires_grad}")
            if difference is not None:
                return difference
    return None


def _outputs(model: nn.Module, call: Sample, training: bool) -> list[torch.Tensor]:
    call = call.clone()
    with fixed_randomness():
        duplicate: Any = copy.deepcopy(model).train(training)
        return tensors_of(duplicate(*call.args, **call.kwargs))
