"""Whether two models agree in one mode: compares a whole graph with the Python model, on copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import nn

from recfx.collections.converted_collection import converted_collections
from recfx.collections.copy_modules import copy_with_tensors
from recfx.collections.sharding.ranks_agree import any_rank
from recfx.discovery.sample import Sample
from recfx.verification.run_step import COMPARED, Run, run_step

Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """The outcome of two steps.

    Args:
        wanted: the step of the model that is right by definition; None if it failed.
        found: the step of the other model; None if either failed.
        expected_error: why there is no ``wanted``.
        actual_error: why there is no ``found``.
        result: the result of the comparison; None if nothing was compared.
        unsteady: names of the values that differ between two steps of the first model; None if the two models agreed on
            every rank.
    """

    wanted: Run | None = None
    found: Run | None = None
    expected_error: Exception | None = None
    actual_error: Exception | None = None
    result: Result | None = None
    unsteady: frozenset[object] | None = None


def compare_models(
    expected: Callable[[], Run],
    actual: Callable[[], Run],
    compare: Callable[[Run, Run], Result],
    different: Callable[[Result], Collection[object]],
    *,
    again: Callable[[], Run] | None = None,
    any_rank: Callable[[bool], bool] = bool,
) -> Outcome[Result]:
    """Run both models and compare; if anything differs, see whether the first one agrees with itself under one seed.

    Args:
        expected: one step of a copy of the model that is right by definition.
        actual: one step of a copy of the other model.
        compare: compares both runs.
        different: names of the values that differ in a result.
        again: one more step of the first model. None: ``expected`` makes a new copy each time.
        any_rank: whether a flag is set on any rank; if steps communicate, all ranks must run the same steps.
    """
    try:
        wanted = expected()
    except Exception as error:  # the model itself fails, so there is nothing to compare with
        return Outcome(expected_error=error)
    try:
        found = actual()
    except Exception as error:
        return Outcome(wanted, actual_error=error)
    result = compare(wanted, found)
    if not any_rank(bool(different(result))):
        return Outcome(wanted, found, result=result)
    unsteady = frozenset(different(compare(wanted, (again or expected)())))
    return Outcome(wanted, found, result=result, unsteady=unsteady)


def batch_sizes(sample: Sample) -> list[tuple[str, Sample | None]]:
    """The calls to compare with, by name; the second is None if the sample's batch size is unknown."""
    return [("sample", sample), ("sample + 1", sample.resized())]


@dataclass(frozen=True)
class Difference:
    """A difference between two runs.

    Args:
        where: the value that differs.
        message: how they differ.
    """

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
    if expected.numel() == 0:
        return 0.0
    same = (expected == actual) | (expected.isnan() & actual.isnan())  # inf - inf is NaN, too
    difference = (expected.double() - actual.double()).abs().masked_fill(same, 0.0)
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max())


def compare_forward(expected: nn.Module, actual: nn.Module, sample: Sample, training: bool) -> Difference | str | None:
    """Compare one step of two models, on copies, at two batch sizes in one mode.

    With sharded collections the steps communicate: all ranks compare together and agree on the result.

    Returns:
        the first difference in outputs, gradients, parameters or buffers; None if they agree; text if ``expected``
        itself fails on the sample, so that nothing was compared.
    """
    on_any_rank = partial(any_rank, [each.process_group for each in converted_collections(expected).values()])
    for _, call in batch_sizes(sample):
        if on_any_rank(call is None) or call is None:
            continue
        outcome = compare_models(
            partial(_step, expected, call, training),
            partial(_step, actual, call, training),
            _first_difference,
            lambda difference: [] if difference is None else [difference.where],
            any_rank=on_any_rank,
        )
        if outcome.expected_error is not None:
            if call is sample:
                return f"{type(outcome.expected_error).__name__}: {outcome.expected_error}"
            continue
        if outcome.actual_error is not None:
            return Difference("forward", f"raises {type(outcome.actual_error).__name__}: {outcome.actual_error}")
        if outcome.unsteady is not None and not on_any_rank(bool(outcome.unsteady)):
            return outcome.result or Difference("another rank", "its values differ")
        # Otherwise they agree, or the model differs from itself under the same seed.
    return None


def _step(model: nn.Module, call: Sample, training: bool) -> Run:
    return run_step(copy_with_tensors(model), call, training)


def _first_difference(wanted: Run, found: Run) -> Difference | None:
    for what in COMPARED:
        expected, actual = getattr(wanted, what), getattr(found, what)
        if set(expected) != set(actual):
            return Difference(what, f"only one of them has {sorted(set(expected) ^ set(actual))}")
        for name, value in expected.items():
            difference = compare_tensors(f"{what} {name}", value, actual[name], rtol=1e-5, atol=1e-6)
            if difference is not None:
                return difference
    return None
