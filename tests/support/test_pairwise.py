"""``tests.support.pairwise`` leaves out no pair of values, and little else stays."""

from __future__ import annotations

import itertools

import pytest

from tests.support.pairwise import rows_of


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((7, 3, 3, 3), 24), ((3, 2, 3, 3), 12), ((2, 2, 2), 6), ((4, 1), 4), ((5,), 5), ((6, 5, 4, 3), 32)],
)
def test_every_pair_is_in_a_row(sizes: tuple[int, ...], most: int) -> None:
    lists = [[f"{column}{value}" for value in range(size)] for column, size in enumerate(sizes)]
    rows = rows_of(lists)
    for left, right in itertools.combinations(range(len(sizes)), 2):
        assert {(row[left], row[right]) for row in rows} == set(itertools.product(lists[left], lists[right]))
    assert {row[0] for row in rows} == set(lists[0])
    assert len(rows) <= most
    assert rows == rows_of(lists)
