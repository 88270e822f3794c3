"""Cases in which any two values of different arguments meet, instead of all values of all arguments."""

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import pytest

Place = tuple[int, int]
"""The number of a list, and that of a value in it."""


def pairwise(**arguments: Iterable[Any]) -> pytest.MarkDecorator:
    """In place of one ``parametrize`` for each argument: about as many cases as its two longest lists have pairs.

    For arguments that the code looks at one or two at a time. The cases depend on the lists alone.
    """
    return pytest.mark.parametrize(tuple(arguments), rows_of([list(values) for values in arguments.values()]))


def rows_of(lists: list[list[Any]]) -> list[tuple[Any, ...]]:
    """One value of each list in every row; any value of one list is in a row with any value of another."""
    if len(lists) == 1:
        return [(value,) for value in lists[0]]
    longest_first = sorted(range(len(lists)), key=lambda column: -len(lists[column]))
    missing = {
        frozenset([(left, i), (right, j)])
        for left, right in itertools.combinations(range(len(lists)), 2)
        for i, j in itertools.product(range(len(lists[left])), range(len(lists[right])))
    }
    rows = []
    while missing:
        row: list[Place] = []
        for column in longest_first:
            places = [(column, number) for number in range(len(lists[column]))]
            row.append(max(places, key=functools.partial(_use, row, missing)))
        missing -= {frozenset(pair) for pair in itertools.combinations(row, 2)}
        rows.append([number for _, number in sorted(row)])
    return [tuple(values[number] for values, number in zip(lists, row, strict=True)) for row in sorted(rows)]


def _use(row: list[Place], missing: set[frozenset[Place]], place: Place) -> tuple[int, int]:
    """How many missing pairs a value makes with those of a row, and how many it is in at all."""
    return sum(frozenset([place, other]) in missing for other in row), sum(place in pair for pair in missing)
