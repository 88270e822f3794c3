"""The C++ operator against its reference, on tables of every format, with and without an index."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.hashing import HashConfig, HashIndex
from tests.kernels.served import Case, ServedTable, cases, served_lookup, served_lookup_reference, stored_rows
from tests.kernels.threads import assert_same_on_any_threads


@settings(max_examples=120, deadline=None)
@given(cases())
def test_agrees_with_its_reference(case: Case) -> None:
    pooled = served_lookup(*case.arguments())  # type: ignore[arg-type]
    expected = served_lookup_reference(*case.arguments())  # type: ignore[arg-type]
    torch.testing.assert_close(
        pooled, expected, rtol=1e-5, atol=1e-3
    )  # sums of up to 200 numbers of up to 15, in another order


@settings(max_examples=15, deadline=None)
@given(cases(times=100))
def test_threads_do_not_matter(case: Case) -> None:
    assert_same_on_any_threads(lambda: [served_lookup(*case.arguments())])  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 3]), st.sampled_from([1, 2, 3, 8, 17, 64, 100, 260]), st.booleans(), st.integers(0, 1000))
def test_a_bag_of_one_id_is_the_sum_of_its_row(row_format: int, columns: int, is_weighted: bool, seed: int) -> None:
    """Bit for bit: a second id, which has no row, adds nothing."""
    generator = torch.Generator().manual_seed(seed)
    columns += columns % 2 if row_format == 3 else 0
    rows = stored_rows(torch.randn(8, columns, generator=generator), row_format).reshape(-1)
    index = HashIndex(8, config=HashConfig(dense_rows=0))
    known = torch.arange(100, 108)
    index.find_or_insert(known)
    tables = [ServedTable(8, columns, row_format, index.slot_count)]
    slots, scale = index.slot_table()[0], torch.randn(8, generator=generator)

    def pooled(ids: torch.Tensor, length: int, scale: torch.Tensor) -> torch.Tensor:
        offsets = torch.arange(0, ids.numel() + 1, length)
        return served_lookup(ids, offsets, rows, tables, [0], slots, False, scale if is_weighted else None)

    both = torch.stack([known, torch.full((8,), 77777)], dim=1).view(-1)
    assert torch.equal(pooled(known, 1, scale), pooled(both, 2, scale.repeat_interleave(2)))
    assert not pooled(both[1::2], 1, scale).any()


def test_opcheck() -> None:
    rows = stored_rows(torch.randn(10, 6), 2).reshape(-1)
    empty = torch.empty(0, 2, dtype=torch.int64)
    arguments = ([10], [6], [2], [0], empty, [0], [-1], [0], [0], [0], False, None)
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
    for unpooled in (False, True):
        torch.library.opcheck(torch.ops.recfx.served_lookup, (ids, offsets, rows, *arguments, unpooled))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.tensor([10])}, "id_out_of_range"),
        ({"ids": torch.tensor([-1])}, "id_out_of_range"),
        ({"ids": torch.tensor([1], dtype=torch.int32)}, "int64"),
        ({"offsets": torch.tensor([0, 2])}, "ascend within"),
        ({"rows": torch.zeros(99, dtype=torch.uint8)}, "bytes"),
        ({"tables": [ServedTable(10, 6, 4)]}, "is not one"),
        ({"tables": [ServedTable(10, 6, 2, slots=4)]}, "too few slots"),
        ({"table_of_feature": [1]}, "no table"),
        ({"per_sample_weights": torch.zeros(2)}, "per_sample_weights"),
        (
            {"tables": [ServedTable(10, 6, 2, slots=4)], "slots": torch.tensor([[1, 10]] * 4)},
            "id_out_of_range",
        ),  # a slot that names a row beyond the table
        ({"offsets": torch.tensor([0, 0]), "unpooled": True}, "must all be in a bag"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "ids": torch.tensor([1]),
        "offsets": torch.tensor([0, 1]),
        "rows": torch.zeros(100, dtype=torch.uint8),
        "tables": [ServedTable(10, 6, 2)],
        "table_of_feature": [0],
        "slots": torch.empty(0, 2, dtype=torch.int64),
    }
    with pytest.raises((RuntimeError, IndexError), match=message):
        served_lookup(**(arguments | change))  # type: ignore[arg-type]
