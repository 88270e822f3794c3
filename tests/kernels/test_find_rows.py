"""Copies of indexes, and the reference that finds rows in them, against the index itself."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from recfx.hashing import HashConfig, HashIndex
from recfx.kernels.index import hash_index
from recfx.kernels.index.find_rows import find_rows_reference
from tests.kernels.finding import EXTREMES, TABLES, copies_of, filled


@pytest.mark.parametrize("number", range(len(TABLES)))
def test_rows_are_those_of_the_index(number: int) -> None:
    index = filled(number)
    ids = torch.cat(
        [index.items()[0], torch.tensor(EXTREMES), torch.arange(-50, 50), torch.arange(10**15, 10**15 + 99)]
    )
    own, answered = index.find(ids), index.answer(ids)
    rows, absent = find_rows_reference(ids, torch.tensor([ids.numel()]), copies_of([index]))
    assert torch.equal(rows, answered)
    assert absent.tolist() == [int((own < 0).sum())]


def test_tables_one_after_the_other() -> None:
    """One of them without an index, one without ids in the batch."""
    indexes = [filled(0), None, filled(1), filled(2)]
    asked = [torch.tensor([70, -1, 3]), torch.tensor([5, 9]), torch.tensor([], dtype=torch.int64), torch.tensor([-1])]
    ends = torch.tensor(list(accumulate(map(len, asked))))
    rows, absent = find_rows_reference(torch.cat(asked), ends, copies_of(indexes))
    expected = [ids if index is None else index.answer(ids) for index, ids in zip(indexes, asked, strict=True)]
    assert torch.equal(rows, torch.cat(expected))
    assert absent.tolist() == [
        0 if index is None else int((index.find(ids) < 0).sum()) for index, ids in zip(indexes, asked, strict=True)
    ]


def test_copies_are_the_slots() -> None:
    indexes = [filled(0), filled(1)]
    copies = copies_of(indexes)
    slots, side_rows = torch.empty_like(copies.slots), torch.empty_like(copies.side_rows)
    counts, states = [index.slot_count for index in indexes], [index.row_state for index in indexes]
    arguments = counts, [index.row_ids for index in indexes], states, [index.lock for index in indexes]
    hash_index.slot_tables_(slots, side_rows, *arguments)
    assert torch.equal(slots, torch.cat([index.slot_table()[0] for index in indexes]))
    assert torch.equal(side_rows, torch.cat([index.side_row[:1] for index in indexes]))
    for wrong in (slots[:-1], slots.int()):
        with pytest.raises(RuntimeError, match=r"do not fit into|must be int64"):
            hash_index.slot_tables_(wrong, side_rows, *arguments)
    with pytest.raises(RuntimeError, match="one entry per table"):
        hash_index.slot_tables_(slots, side_rows, counts, arguments[1][:1], *arguments[2:])
    with pytest.raises(RuntimeError, match=r"\d+ ids of table 0 do not fit into 1 slots"):
        hash_index.slot_tables_(slots[:2], side_rows, [1, 1], *arguments[1:])
    full = HashIndex(2, config=HashConfig(dense_rows=0, buckets=1))
    full.find_or_insert(torch.tensor([5, 6]))
    own = [full.row_ids], [full.row_state], [full.lock]
    with pytest.raises(RuntimeError, match="2 ids of table 0 do not fit into 2 slots"):
        hash_index.slot_tables_(slots[:2], side_rows[:1], [2], *own)  # a search for another id would never end


@pytest.mark.parametrize("unseen", ["share", "row"])
def test_slices_answer_for_their_own_ids(unseen: Any) -> None:
    config = HashConfig(dense_rows=10, buckets=4, unseen=unseen)
    ids = torch.cat([torch.arange(20), torch.tensor(EXTREMES)])
    for begin, end in ((0, 5), (5, 10), (10, 30), (30, 50)):
        index = HashIndex(50, config=config, row_begin=begin, row_end=end)
        index.insert(ids[index.holds(ids)])
        rows, _ = find_rows_reference(ids, torch.tensor([ids.numel()]), copies_of([index]))
        assert torch.equal(rows, index.answer(ids))
