"""``find_or_insert`` for several tables at once: each as if it were alone, and all of them or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.kernels.index.index_buffers import STATE
from tests.kernels.indexes import KINDS, assert_same, assert_sound, copy_of, empty, insert, run, tables
from tests.kernels.threads import assert_same_on_any_threads

# Of each table: ids before its stretch that belong to nobody, and its own.
STRETCHES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 70)), min_size=len(KINDS), max_size=len(KINDS)
)


@settings(max_examples=25)
@given(st.lists(STRETCHES, min_size=1, max_size=6))
def test_several_tables_are_each_of_them_alone(batches: list[list[tuple[int, int, int]]]) -> None:
    together, alone = tables(), tables()
    for stretches in batches:
        pieces, begins, ends = [], [], []
        position = 0
        for gap, count, first in stretches:
            pieces.append(torch.full((gap,), -77))
            pieces.append((first + torch.arange(count) * 3) % 40)
            begins.append(position + gap)
            ends.append(position + gap + count)
            position = ends[-1]
        ids = torch.cat([*pieces, torch.tensor([-77])])
        got = run(ids, begins, ends, together)
        trial = [insert(ids[b:e], copy_of(i[0]), i[1]) for b, e, i in zip(begins, ends, alone, strict=True)]
        if any(int(answer.report[0, 1]) >= 0 for answer in trial):
            assert (got.rows == -1).all()
            assert got.new_rows.numel() == got.ids_before.numel() == got.states_before.numel() == 0
            assert got.report[:, 1].tolist() == [int(answer.report[0, 1]) for answer in trial]
        else:
            expected = [insert(ids[b:e], *index) for b, e, index in zip(begins, ends, alone, strict=True)]
            for begin, end, answer in zip(begins, ends, expected, strict=True):
                assert torch.equal(got.rows[begin:end], answer.rows)
            for name in ("new_rows", "states_before", "ids_before", "report"):
                assert torch.equal(getattr(got, name), torch.cat([getattr(answer, name) for answer in expected])), name
            outside = torch.ones_like(ids, dtype=torch.bool)
            for begin, end in zip(begins, ends, strict=True):
                outside[begin:end] = False
            assert (got.rows[outside] == -77).all()
        for (ours, policy), (theirs, _) in zip(together, alone, strict=True):
            assert_same(ours, theirs)
            assert_sound(ours, policy)


def test_ids_of_several_tables_expire_table_by_table() -> None:
    rules: list[dict[str, Any]] = [
        {"evict": "ttl", "ttl_batches": 1},
        {"evict": "lru"},
        {"evict": "ttl", "ttl_batches": 2, "buckets": 3},
    ]
    ours = [empty(30, on_full="evict", **rule) for rule in rules]
    expired = []
    for step in range(6):
        ids = torch.cat([torch.arange(8) + 3 * step + 100 * table for table in range(3)])
        left = run(ids, [0, 8, 16], [8, 16, 24], ours)
        for buffers, policy in ours:
            assert_sound(buffers, policy)
        expired.append(sorted(left.expired_ids.tolist()))
    assert expired == [
        [], [], [0, 1, 2], [3, 4, 5, 200, 201, 202], [6, 7, 8, 203, 204, 205], [9, 10, 11, 206, 207, 208]
    ]  # fmt: skip


@pytest.mark.parametrize("full", [False, True])
def test_several_tables_do_not_depend_on_threads(full: bool) -> None:
    def train() -> list[torch.Tensor]:
        indexes = tables(3000)[:5]
        for step in range(5):
            ids = 500 * step + torch.randint(0, 2500, (40_000,), generator=torch.Generator().manual_seed(step))
            got = run(ids, [0, 9000, 9000, 15_000, 30_000], [8000, 9000, 15_000, 30_000, 40_000], indexes)
            assert (got.report[:, 1] == -1).all()
        if full:
            got = run(torch.arange(40_000), [0] * 5, [0, 0, 0, 0, 20_000], indexes)
            assert got.report[:, 1].max() >= 0
        return [*got, *(getattr(buffers, name) for buffers, _ in indexes for name in STATE)]

    assert_same_on_any_threads(train)


def test_no_tables_and_no_ids() -> None:
    nothing = torch.empty(0, dtype=torch.int64)
    assert [tensor.numel() for tensor in run(nothing, [], [], [])] == [0] * 6
    assert run(torch.tensor([5]), [], [], []).rows.tolist() == [5]
    indexes = tables()
    got = run(nothing, [0] * len(indexes), [0] * len(indexes), indexes)
    assert got.report.tolist() == [[0, -1]] * len(indexes)
    assert [int(buffers.counts[0]) for buffers, _ in indexes] == [1] * len(indexes), "an empty batch is a batch"
