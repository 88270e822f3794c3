"""The operator that finds rows on a device, against its reference on tables of every kind."""

from __future__ import annotations

from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.kernels.index import find_rows_triton as kernel
from recfx.kernels.index.find_rows import IndexFacts, find_rows, find_rows_reference
from tests.kernels.finding import EXTREMES, TABLES, copies_of, filled

INDEXES = [*(filled(number) for number in range(len(TABLES))), None]
KNOWN = [*EXTREMES, *range(5, 30), *(number * 10**12 for number in range(30))]
ids_of_a_table = st.lists(st.one_of(st.sampled_from(KNOWN), st.integers(-(2**63), 2**63 - 1)), max_size=30)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(INDEXES), ids_of_a_table), min_size=1, max_size=6))
def test_finds_what_its_reference_finds(tables: list[tuple[object, list[int]]]) -> None:
    indexes = copies_of([index for index, _ in tables])  # type: ignore[misc]
    ids = torch.tensor([id_ for _, ids in tables for id_ in ids], dtype=torch.int64)
    ends = torch.tensor(list(accumulate(len(ids) for _, ids in tables)))
    for actual, expected in zip(find_rows(ids, ends, indexes), find_rows_reference(ids, ends, indexes), strict=True):
        assert torch.equal(actual, expected)


def test_the_fields_are_in_the_order_of_the_kernel() -> None:
    positions = {name: getattr(kernel, name.upper()).value for name in IndexFacts._fields}
    assert list(positions.values()) == list(range(len(IndexFacts._fields)))
    assert kernel.FIELDS.value == len(IndexFacts._fields)
