"""The different ids of each key, and sums of the rows of equal ones: C++ against the reference, and against a dict."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.kernels.route.different_ids import different_ids, different_ids_reference, sum_rows, sum_rows_reference
from tests.kernels.chosen_ids import mix64_inverse

KEYS = st.lists(
    st.tuples(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 3), max_size=40), st.booleans()), max_size=4
)


@settings(max_examples=150)
@given(KEYS)
def test_each_id_is_found_at_its_first_place(keys: list[tuple[list[int], bool]]) -> None:
    ids = torch.tensor([id_ for of_key, _ in keys for id_ in of_key], dtype=torch.int64)
    counts, chosen = [len(of_key) for of_key, _ in keys], [is_chosen for _, is_chosen in keys]
    is_first, numbers, different = different_ids(ids, counts, chosen)
    for ours, theirs in zip((is_first, numbers), different_ids_reference(ids, counts, chosen), strict=False):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert different == different_ids_reference(ids, counts, chosen)[2].tolist()
    expected: list[int] = []
    for (of_key, is_chosen), count in zip(keys, different, strict=True):
        known: dict[int, int] = {}
        for place, id_ in enumerate(of_key):
            expected.append(known.setdefault(id_ if is_chosen else place, len(known)))
        assert count == len(known)
    assert numbers.tolist() == expected


def test_chosen_ids_are_found_in_little_time() -> None:
    """One slot after the other, they would take two billion steps."""
    ids = mix64_inverse(torch.arange(60_000) << 20)
    begin = time.process_time()
    assert different_ids(ids.repeat(2), [120_000], [True])[2] == [60_000]
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dim", [1, 7, 64])
def test_sums_have_the_bits_of_adding_row_by_row(dim: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    rows, places = torch.randn(9000, dim, generator=generator), torch.randint(0, 5000, (9000,), generator=generator)
    torch.set_num_threads(threads)
    summed = sum_rows(rows, places, 5000)
    expected = torch.zeros(5000, dim)
    for row, place in zip(rows, places.tolist(), strict=True):
        expected[place] += row
    assert torch.equal(summed, expected)
    assert torch.equal(sum_rows_reference(rows, places, 5000), expected)
    assert sum_rows(rows[:0], places[:0], 0).shape == (0, dim)


@pytest.mark.parametrize("operator", [different_ids, different_ids_reference])
@pytest.mark.parametrize(("counts", "chosen"), [([2], [True]), ([4, -1], [True, True]), ([3], []), ([9], [True])])
def test_keys_that_do_not_fit_the_ids_are_refused(operator: Any, counts: list[int], chosen: list[bool]) -> None:
    with pytest.raises(RuntimeError, match="different_ids"):
        operator(torch.tensor([5, 6, 5]), counts, chosen)


@pytest.mark.parametrize("operator", [sum_rows, sum_rows_reference])
@pytest.mark.parametrize("places", [[0, 2], [-1, 0], [0]])
def test_places_that_are_none_are_refused(operator: Any, places: list[int]) -> None:
    with pytest.raises(RuntimeError, match="sum_rows"):
        operator(torch.ones(2, 3), torch.tensor(places), 2)
