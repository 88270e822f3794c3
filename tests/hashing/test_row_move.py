"""Ids of a saved index in a table with more rows."""

import contextlib

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from recfx.errors import CheckpointError, TableFullError
from recfx.hashing import HashConfig, HashIndex
from recfx.hashing.row_move import fit_rows
from recfx.kernels.index.buckets import bucket_begin, bucket_of
from recfx.kernels.index.index_buffers import FREED, NEVER_USED, TAKEN
from tests.support.refusals import refused


def index_of(rows: int, buckets: int, dense_rows: int = 0, seed: int = 0) -> HashIndex:
    return HashIndex(rows, config=HashConfig(buckets=buckets, dense_rows=dense_rows, seed=seed), name="t")


@hypothesis.given(
    dense_rows=st.integers(0, 5),
    saved_rows=st.integers(8, 60),
    more_rows=st.integers(1, 60),
    buckets=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60, unique=True),
    seed=st.integers(-3, 3),
)
def test_every_id_takes_the_lowest_free_row_of_its_bucket_in_the_order_of_old_rows(
    dense_rows: int, saved_rows: int, more_rows: int, buckets: tuple[int, int], ids: list[int], seed: int
) -> None:
    buckets = tuple(min(count, saved_rows - dense_rows) for count in buckets)
    source = index_of(saved_rows, buckets[0], dense_rows, seed)
    for id_ in ids:  # as many as go in, and holes between them
        bucket = int(bucket_of(torch.tensor([id_]), buckets[0], seed))
        if int(source.bucket_taken[bucket]) < len(source.policy.rows_of(bucket)):
            source.insert(torch.tensor([id_]))
    source.erase(torch.tensor(ids[::3], dtype=torch.int64))
    saved = {name: value.clone() for name, value in source.state_dict().items()}
    target = index_of(saved_rows + more_rows, buckets[1], dense_rows, seed)
    config = target.config

    placed = [(row, id_) for row, id_ in enumerate(saved["row_ids"].tolist()) if saved["row_state"][row] == 1]
    expected: dict[int, int] = {}
    taken = [0] * config.buckets
    fits = True
    for _, id_ in placed:
        bucket = int(bucket_of(torch.tensor([id_]), config.buckets, seed))
        begin, end = (bucket_begin(b, config.rows, dense_rows, config.buckets) for b in (bucket, bucket + 1))
        expected[id_] = begin + taken[bucket]
        taken[bucket] += 1
        fits = fits and expected[id_] < end
    if not fits:
        with refused("bucket_too_small", "t", error=CheckpointError):
            fit_rows(target, saved)
        return
    state, move = fit_rows(target, saved)
    assert move is not None
    target.load_state_dict(state)
    assert dict(zip(*(part.tolist() for part in target.items()), strict=True)) == expected
    old_of = {int(new): int(old) for old, new in zip(move.old_rows, move.new_rows, strict=True)}
    assert all(old_of[row] == row for row in range(dense_rows))
    assert {expected[id_]: row for row, id_ in placed} == {new: old for new, old in old_of.items() if new >= dense_rows}


def test_rows_that_lose_their_ids_are_marked_as_used_and_others_are_not() -> None:
    source, target = index_of(8, 1), index_of(16, 1)
    source.insert(torch.arange(100, 103))
    target.insert(torch.arange(200, 205))
    target.erase(torch.tensor([204]))
    state, _ = fit_rows(target, dict(source.state_dict()))
    assert state["row_state"].tolist() == [TAKEN] * 3 + [FREED] * 2 + [NEVER_USED] * 11


def test_candidates_and_scores_move_too_and_counters_do_not() -> None:
    source, target = (
        HashIndex(rows, config=HashConfig(buckets=buckets, on_full="evict", admit_after=4))
        for rows, buckets in ((8, 2), (32, 4))
    )
    source.insert(torch.arange(100, 104).repeat(4))
    saved = {name: value.clone() for name, value in source.state_dict().items()}
    saved["row_scores"].copy_(saved["row_ids"] * 10)
    saved["candidate_ids"][[1, 4, 6]] = torch.tensor([-1, 900, 901])  # -1 is a legal id
    saved["candidate_counts"][[1, 4, 6]] = torch.tensor([3, 1, 2], dtype=torch.int32)
    saved["candidate_order"][[1, 4, 6]] = torch.tensor([50, 51, 52])
    saved["counts"].copy_(torch.arange(6))
    state, _ = fit_rows(target, saved)
    assert torch.equal(state.pop("slice_counts"), saved["slice_counts"]), "only their sums matter"
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        name: tuple(value.shape) for name, value in target.state_dict().items() if name != "slice_counts"
    }
    row_ids, scores = state["row_ids"], state["row_scores"]
    assert torch.equal(scores, torch.where(state["row_state"] == 1, row_ids * 10, 0))
    assert sorted(row_ids[state["row_state"] == 1].tolist()) == [100, 101, 102, 103]
    counts = state["candidate_counts"]
    rows = torch.nonzero(counts).squeeze(1)
    moved = {int(state["candidate_ids"][row]): (int(counts[row]), int(state["candidate_order"][row])) for row in rows}
    assert moved == {-1: (3, 50), 900: (1, 51), 901: (2, 52)}
    for row in rows:
        bucket = int(bucket_of(state["candidate_ids"][row].view(1), 4, 0))
        assert bucket * 8 <= row < bucket * 8 + 8
    assert torch.equal(state["counts"], torch.arange(6))


def test_rows_do_not_move_by_other_dense_rows() -> None:
    source, target = index_of(64, 1), index_of(128, 4, dense_rows=3)
    source.insert(torch.arange(100, 130))
    with refused("dense_rows_mismatch", error=CheckpointError):
        fit_rows(target, source.state_dict())
    damaged = {**source.state_dict(), "identity": source.identity * torch.tensor([1, 1, 1, 0])}
    with refused("torn_state", error=CheckpointError):
        fit_rows(index_of(128, 4), damaged)


@pytest.mark.parametrize(
    ("saved_buckets", "buckets", "kept"),
    [(2, 2, {17: 3, 35: 7}), (1, 3, {11: 7, 23: 7, 35: 7}), (4, 2, {17: 1, 35: 5})],
)
def test_the_rows_of_unseen_ids_move_to_the_ends_of_their_buckets(
    saved_buckets: int, buckets: int, kept: dict[int, int]
) -> None:
    source, target = (
        HashIndex(rows, config=HashConfig(buckets=count, unseen="row"), name="t")
        for rows, count in ((8, saved_buckets), (36, buckets))
    )
    with contextlib.suppress(TableFullError):
        source.insert(torch.arange(100, 104))
    state, move = fit_rows(target, dict(source.state_dict()))
    assert move is not None
    moved = dict(zip(move.new_rows.tolist(), move.old_rows.tolist(), strict=True))
    assert {row: moved[row] for row in kept} == kept
    assert len(moved) == move.new_rows.numel() == len(source) + buckets
    target.load_state_dict(state)
    for asked in torch.arange(100, 120).split(1):
        read = int(target.answer(asked))
        assert read in kept if int(source.find(asked)) < 0 else moved[read] == int(source.find(asked))


def test_a_bucket_that_needs_the_row_of_unseen_ids() -> None:
    full = HashIndex(4, config=HashConfig(buckets=1), name="t")
    full.insert(torch.arange(100, 104))
    fits, too_small = (
        HashIndex(rows, config=HashConfig(buckets=buckets, unseen="row"), name="t")
        for rows, buckets in ((5, 1), (6, 3))
    )
    state, _ = fit_rows(fits, dict(full.state_dict()))
    fits.load_state_dict(state)
    assert sorted(fits.items()[1].tolist()) == [0, 1, 2, 3]
    with refused("bucket_too_small", error=CheckpointError):
        fit_rows(too_small, dict(full.state_dict()))
