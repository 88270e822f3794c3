"""Whether two models agree in one mode: compares a whole graph with the Python model, on copies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from recfx.collections.converted_collection import converted_collections
from recfx.collections.copy_modules import copy_with_tensors
from recfx.collections.sharding.ranks_agree import any_rank
from recfx.discovery.sample import Sample
from recfx.verification.run_step import COMPARED, Run, run_step


def batch_sizes(sample: Sample) -> list[tuple[str, Sample | None]]:
    """The calls to compare with, by name; the second is None if the sample's batch size is unknown."""
    return [("sample", sample), ("sample + 1", sample.resized())]


@dataclass(frozen=True)
class Difference:
    """A difference between two runs: the value that differs, and how."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def compare_tensors(
    where: str, expected: torch.Tensor, actual: torch.Tensor, rtol: float, atol: float
) -> Difference | None:
    """The difference; None if shape and dtype are equal and the values are close."""
    if expected.shape != actual.shape:
        return Difference(where, f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if expected.dtype != actual.dtype:
        return Difference(where, f"dtype {actual.dtype} instead of {expected.dtype}")
    if torch.allclose(expected, actual, rtol=rtol, atol=atol, equal_nan=True):
        return None
    return Difference(where, f"largest difference {largest_difference(expected, actual):.3g}")


def largest_difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """The largest absolute difference: 0 for empty tensors; inf if one has a NaN or the shapes differ."""
    expected, actual = expected.detach(), actual.detach()
    if expected.shape != actual.shape:
        return math.inf
    if expected.numel() == 0 or torch.equal(expected, actual):
        return 0.0
    same = (expected == actual) | (expected.isnan() & actual.isnan())  # inf - inf is NaN, too
    difference = (expected.double() - actual.double()).abs().masked_fill(same, 0.0)
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max())


def compare_forward(
    expected: nn.Module, actual: nn.Module, sample: Sample, training: bool
) -> Difference | Exception | None:
    """Compare one step of two models, on copies, at two batch sizes in one mode.

    With sharded collections the steps communicate: all ranks compare together and agree on the result.

    Returns:
        the first difference in outputs, gradients, parameters or buffers; None if they agree; the error of
        ``expected`` if it fails on the sample itself, so that nothing was compared.
    """
    on_any_rank = partial(any_rank, [one.process_group for one in converted_collections(expected).values()])
    for _, call in batch_sizes(sample):
        if on_any_rank(call is None) or call is None:
            continue
        try:
            expected_run = _step(expected, call, training)
        except Exception as error:  # the model itself fails, so there is nothing to compare with
            if call is sample:
                return error
            continue
        try:
            actual_run = _step(actual, call, training)
        except Exception as error:
            return Difference("forward", f"raises {type(error).__name__}: {error}")
        difference = _first_difference(expected_run, actual_run)
        if not on_any_rank(difference is not None):
            continue
        again = _first_difference(expected_run, _step(expected, call, training))
        if not on_any_rank(again is not None):  # otherwise, the model differs from itself under the same seed
            return difference or Difference("another rank", "its values differ")
    return None


def _step(model: nn.Module, call: Sample, training: bool) -> Run:
    return run_step(copy_with_tensors(model), call, training)


def _first_difference(expected_run: Run, actual_run: Run) -> Difference | None:
    for what in COMPARED:
        expected, actual = getattr(expected_run, what), getattr(actual_run, what)
        of_one = set(expected) - set(actual) if what == "buffers" else set(expected) ^ set(actual)
        if of_one:  # a graph may have more buffers: tensors that the model's code makes, or keeps as attributes
            return Difference(what, f"only one of them has {sorted(of_one)}")
        for name, value in expected.items():
            difference = compare_tensors(f"{what} {name}", value, actual[name], rtol=1e-5, atol=1e-6)
            if difference is not None:
                return difference
    return None
