"""Runs one step of two models on the same call and compares them; ``verify`` and whole graphs both use it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from recfx.discovery.sample import Sample
from recfx.verification.run import Run

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
