"""Run one step of two models on the same call and compare them: the one runner, of ``verify`` and of whole graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from recfx.tracing.sample import Sample
from recfx.verification.run import Run

Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """What came of two steps.

    Args:
        wanted: of the model that is right by definition; None if it failed.
        found: of the other; None if either failed.
        expected_error: why there is no ``wanted``.
        actual_error: why there is no ``found``.
        result: of the comparison; None if there was none.
        unsteady: names of what differs between two steps of the first model; None if nothing differed on any rank.
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
        actual: one step of a copy of the other.
        compare: both runs.
        different: names of what differs in a result.
        again: one more step of the first model; None: ``expected`` makes a new copy each time.
        any_rank: whether any rank has a flag: where steps communicate, all ranks must run them alike.
    """
    try:
        wanted = expected()
    except Exception as error:  # the model's own failure: there is nothing to compare with
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
    """The calls to compare with, by name; None for a second batch size if the sample's own cannot be told."""
    return [("sample", sample), ("sample + 1", sample.resized())]
