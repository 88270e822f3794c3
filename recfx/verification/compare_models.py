"""Whether two steps, or two models in one mode, agree: value by value, on copies."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
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


def compare_runs(
    expected_run: Run, actual_run: Run, rtol: float = 1e-5, atol: float = 1e-6, masked: Collection[str] = ()
) -> Iterator[tuple[str, str, float, str]]:
    """Every value of two steps: what it is, its name, the largest difference, and how it differs (``""``: it does not).

    Rows of ``masked`` weights may differ if the batch did not use them: the dense rule updates them, the fused rule
    does not.
    """
    for what in COMPARED:
        expected, actual = getattr(expected_run, what), getattr(actual_run, what)
        for where in sorted(expected.keys() | actual.keys()):
            pair = [expected.get(where), actual.get(where)]
            if what == "parameters" and where in masked:
                pair = [touched(value, expected_run.touched.get(where)) for value in pair]
            first, second = pair
            if first is not None and second is not None and first.dtype == second.dtype and torch.equal(first, second):
                yield what, where, 0.0, ""
            elif first is not None and second is not None:
                difference = compare_tensors(where, first, second, rtol, atol)
                yield what, where, largest_difference(first, second), "" if difference is None else difference.message
            elif what == "gradients" and not bool((second if first is None else first).any()):
                yield what, where, 0.0, ""  # a missing gradient counts as zero
            else:
                yield what, where, math.inf, f"only the {'converted' if first is None else 'original'} model has it"


def touched(value: torch.Tensor | None, rows: torch.Tensor | None) -> torch.Tensor | None:
    """The rows that the batch used: a fused step updates only these, a dense step may update others."""
    return value if value is None or rows is None else value[rows[rows < value.shape[0]]]


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


def _first_difference(expected: Run, actual: Run) -> Difference | None:
    for what, where, _, message in compare_runs(expected, actual):
        # A graph may have more buffers: tensors that the model's code makes, or keeps as attributes.
        if message and (what != "buffers" or where in expected.buffers):
            return Difference(f"{what} {where}", message)
    return None
