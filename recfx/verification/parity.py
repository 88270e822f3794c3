"""Run two models on the same call and say where they first differ. On copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from recfx.modules.converted_collection import converted_collections
from recfx.modules.copy_modules import copy_with_tensors
from recfx.sharding.ranks_agree import any_rank
from recfx.tracing.sample import Sample
from recfx.verification.run_step import Run, run_step


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
    expected, actual = expected.detach(), actual.detach()
    if expected.shape != actual.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    difference = (expected.double() - actual.double()).abs().nan_to_num(nan=float("inf"))
    both_nan = expected.isnan() & actual.isnan() if expected.is_floating_point() else None
    if both_nan is not None:
        difference = difference.masked_fill(both_nan, 0.0)
    return float(difference.max())


def compare_forward(expected: nn.Module, actual: nn.Module, sample: Sample, training: bool) -> Difference | str | None:
    """Compare one step of two models, on copies, at two batch sizes in one mode.

    With sharded collections the steps communicate: all ranks compare together, and agree on what comes of it.

    Returns:
        the first difference in outputs, gradients, parameters or buffers; None if they agree; text where ``expected``
        itself fails on the sample, so that nothing was compared.
    """
    for call in (sample, sample.resized()):
        if _any_rank(expected, call is None) or call is None:
            continue
        try:
            wanted = run_step(copy_with_tensors(expected), call, training)
        except Exception as error:  # the model's own failure: nothing to compare with
            if call is sample:
                return f"{type(error).__name__}: {error}"
            continue
        try:
            found = run_step(copy_with_tensors(actual), call, training)
        except Exception as error:
            return Difference("forward", f"raises {type(error).__name__}: {error}")
        difference = _first_difference(wanted, found)
        if not _any_rank(expected, difference is not None):
            continue
        again = _first_difference(wanted, run_step(copy_with_tensors(expected), call, training))
        if not _any_rank(expected, again is not None):
            return difference or Difference("another rank", "its values differ")
        # else the model differs from itself under one seed
    return None


def _any_rank(model: nn.Module, flag: bool) -> bool:
    """``flag``; with sharded collections, whether any rank has it: they must go on alike."""
    return any_rank((each.process_group for each in converted_collections(model).values()), flag)


def _first_difference(wanted: Run, found: Run) -> Difference | None:
    for what in ("outputs", "gradients", "parameters", "buffers"):
        expected, actual = getattr(wanted, what), getattr(found, what)
        if set(expected) != set(actual):
            return Difference(what, f"only one of them has {sorted(set(expected) ^ set(actual))}")
        for name, value in expected.items():
            difference = compare_tensors(f"{what} {name}", value, actual[name], rtol=1e-5, atol=1e-6)
            if difference is not None:
                return difference
    return None
