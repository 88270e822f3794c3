"""Indexes of slices of a table against one of the whole table: the same rows, scores, candidates and counts."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recfx.errors import CheckpointError, InputError, TableFullError
from recfx.hashing import HashConfig, HashIndex, ResolvedHashConfig
from recfx.hashing.row_move import fit_rows
from recfx.hashing.slices import SLICE_COUNTS, SliceCounts, folded, join_states, row_cuts, slice_state
from recfx.kernels.index import hash_index
from recfx.kernels.lookup.pooled_lookup import find_and_pool
from tests.hashing.strategies import CROWD, IDS, assert_refused, configurations, state_of
from tests.support.refusals import refused

State = dict[str, torch.Tensor]


class Slices:
    """One table in pieces, each id sent to the piece that owns it."""

    def __init__(self, config: ResolvedHashConfig, borders: list[int], state: State | None = None) -> None:
        self.indexes = []
        for begin, end in itertools.pairwise(borders):
            if begin == end:
                continue
            index = HashIndex(config.rows, config=config, row_begin=begin, row_end=end)
            if state is not None:
                index.load_state_dict(slice_state(config, state, begin, end))
            self.indexes.append(index)

    def owned(self, index: HashIndex, ids: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(index.holds(ids)).squeeze(1)

    def answers(self, method: str, ids: torch.Tensor) -> torch.Tensor:
        """Answers of ``HashIndex.<method>``, as rows of the table."""
        answers = torch.full_like(ids, -9)
        for index in self.indexes:
            places = self.owned(index, ids)
            answers[places] = of_table(getattr(index, method)(ids[places]), index)
        assert bool((answers != -9).all()), "an id without owner"
        return answers

    def insert(self, ids: torch.Tensor, in_flight: int) -> tuple[torch.Tensor, list[torch.Tensor]] | int:
        """Answers and new rows of each piece, as rows of the table; or a bucket that is full."""
        answers, new_rows = torch.full_like(ids, -9), []
        full = []
        for index in self.indexes:
            places = self.owned(index, ids)
            inserted = insert(index, ids[places], in_flight)
            if isinstance(inserted, int):
                full.append(inserted)
                continue
            answers[places] = of_table(inserted[0], index)
            new_rows.append(inserted[1] + index.policy.row_begin)
        return full[0] if full else (answers, new_rows)

    def state(self) -> State:
        return join_states([state_of(index) for index in self.indexes])


def of_table(rows: torch.Tensor, index: HashIndex) -> torch.Tensor:
    untrained = rows < -1
    rows = torch.where(untrained, -rows - 2, rows)
    rows = torch.where(rows >= 0, rows + index.policy.row_begin, rows)
    return torch.where(untrained, -rows - 2, rows)


def insert(index: HashIndex, ids: torch.Tensor, in_flight: int) -> tuple[torch.Tensor, torch.Tensor] | int:
    oldest = int(index.counts[0]) + 1 - in_flight
    inserted = hash_index.find_or_insert(
        ids, [0], [ids.numel()], [index.index_buffers()], [index.policy], [hash_index.InFlight.since(oldest)]
    )
    index.written()
    full_bucket = int(inserted.report[0, 1])
    return full_bucket if full_bucket >= 0 else (inserted.rows, inserted.new_rows)


def assert_one_table(slices: Slices, whole: HashIndex) -> None:
    torch.testing.assert_close(slices.state(), state_of(whole), rtol=0, atol=0)
    ids, rows = whole.items()
    pieces = [index.items() for index in slices.indexes]
    assert torch.equal(torch.cat([ids for ids, _ in pieces]), ids)
    own_rows = [rows + index.policy.row_begin for (_, rows), index in zip(pieces, slices.indexes, strict=True)]
    assert torch.equal(torch.cat(own_rows), rows)
    assert sum(len(index) for index in slices.indexes) == len(whole)
    worst = max((index.occupancy() for index in slices.indexes), key=lambda o: o.worst_bucket_taken)
    assert worst.worst_bucket_taken <= len(whole.policy.rows_of(worst.worst_bucket))
    assert torch.equal(torch.cat([index.bucket_taken for index in slices.indexes]), whole.bucket_taken)


ACTIONS = st.sampled_from(["insert", "insert", "insert", "in flight", "find", "answer", "erase", "reshard", "reshard"])
STEPS = st.lists(st.tuples(ACTIONS, st.one_of(st.lists(IDS, max_size=30), CROWD, CROWD)), min_size=8, max_size=16)


@settings(max_examples=200)
@given(configurations(), st.lists(st.integers(1, 4), min_size=1), STEPS)
def test_slices_are_the_whole(
    rows_and_config: tuple[int, HashConfig], worlds: list[int], steps: list[tuple[str, list[int]]]
) -> None:
    rows, config = rows_and_config
    whole = HashIndex(rows, config=config)
    resolved = whole.config
    slices = Slices(resolved, row_cuts(resolved, worlds[0]))
    for step, (action, id_list) in enumerate(steps):
        ids = torch.tensor(id_list, dtype=torch.int64)
        if action in ("insert", "in flight"):
            in_flight = 1 + len(id_list) % 3 if action == "in flight" else 0
            expected, got = insert(whole, ids, in_flight), slices.insert(ids, in_flight)
            if isinstance(expected, int):
                assert isinstance(got, int)
                return  # slices that were not full have gone on
            assert not isinstance(got, int)
            assert torch.equal(got[0], expected[0])
            for index, new_rows in zip(slices.indexes, got[1], strict=True):
                own = (expected[1] >= index.policy.row_begin) & (expected[1] < index.policy.row_end)
                assert torch.equal(new_rows, expected[1][own])
        elif action == "reshard":
            borders = row_cuts(resolved, worlds[step % len(worlds)])
            slices = Slices(resolved, borders, slices.state())
        else:
            assert torch.equal(slices.answers(action, ids), getattr(whole, action)(ids))
        assert_one_table(slices, whole)


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 0), (5, 5), (7, 3), (-1, 10), (0, 31), (0, 11), (12, 20), (11, 30), (20, 29), (30, 30)]
)
def test_impossible_slices(begin: int, end: int) -> None:
    """Ten dense rows, and two buckets of ten."""
    with refused("invalid_hash_config", "t1"):
        HashIndex(30, config=HashConfig(dense_rows=10, buckets=2), name="t1", row_begin=begin, row_end=end)
    policy = HashConfig(dense_rows=10, buckets=2).resolve(30, False).policy
    whole = HashIndex(30, config=HashConfig(dense_rows=10, buckets=2))
    with pytest.raises(RuntimeError, match="slice"):
        insert_with(whole, policy._replace(row_begin=begin, row_end=end))


def insert_with(index: HashIndex, policy: Any) -> None:
    in_flight = [hash_index.InFlight.nothing()]
    hash_index.find_or_insert(torch.tensor([50]), [0], [1], [index.index_buffers()], [policy], in_flight)


# One slice by itself


def middle(**config: Any) -> HashIndex:
    """Rows 5 to 20 of 30: five dense ones, and the first of two buckets of ten."""
    resolved = HashConfig(**{"dense_rows": 10, "buckets": 2, **config})
    return HashIndex(30, config=resolved, name="t1", row_begin=5, row_end=20)


def ids_of(index: HashIndex, count: int, owned: bool = True) -> torch.Tensor:
    ids = torch.arange(1000, 1400)
    return ids[index.holds(ids) == owned][:count]


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_ids_of_other_slices_are_refused(evict: str) -> None:
    index = middle(on_full="evict", evict=evict, admit_after=2, unseen="share")
    index.insert(ids_of(index, 14).repeat(2)[:18])
    before = {key: value.clone() for key, value in index._buffers.items() if value is not None}
    foreign_id = int(ids_of(index, 1, owned=False))
    for foreign in (foreign_id, 4, 0):
        ids = torch.cat([ids_of(index, 3), torch.tensor([foreign, 7])])
        with pytest.raises(InputError, match=rf"\[foreign_id\] t1: Id {foreign} does not belong to rows 5 to 20"):
            index.insert(ids)
        with pytest.raises(RuntimeError, match=f"id {foreign} .*belongs to another slice"):
            insert(index, ids, 0)
        assert index.find(ids).tolist()[3:] == [-1, 2]
        assert index.answer(ids).tolist()[3:] == [-1, 2]
        assert index.erase(torch.tensor([foreign])).tolist() == [-1]
    for key, value in before.items():
        if key != "eval_counts":
            assert torch.equal(value, index._buffers[key]), key  # type: ignore[arg-type]


def test_a_slice_of_dense_rows_only() -> None:
    index = HashIndex(
        30, config=HashConfig(dense_rows=10, buckets=2, on_full="evict", admit_after=2), row_begin=3, row_end=10
    )
    assert index.insert(torch.tensor([3, 9, 3])).rows.tolist() == [0, 6, 0]
    assert index.find(torch.tensor([2, 3, 10, -1])).tolist() == [-1, 0, -1, -1]
    assert (len(index), index.occupancy()) == (0, (0, 0, -1, 0, 0))
    assert index.erase(torch.tensor([3])).tolist() == [-1]
    loaded = HashIndex(30, config=index.config, row_begin=3, row_end=10)
    loaded.load_state_dict(state_of(index))
    torch.testing.assert_close(state_of(loaded), state_of(index), rtol=0, atol=0)


def test_a_full_bucket_has_the_tables_number() -> None:
    index = HashIndex(30, config=HashConfig(dense_rows=10, buckets=2), name="t1", row_begin=20, row_end=30)
    index.insert(ids_of(index, 2))
    with refused(
        "table_full", match=r"bucket 1 of 2 of table 't1' .* \(2 of the slice's 10 rows", error=TableFullError
    ):
        index.insert(ids_of(index, 11))


def test_moving_and_copying_keep_the_slice() -> None:
    index = middle(on_full="evict")
    index.insert(ids_of(index, 3))
    meta = HashIndex(30, config=index.config, name="t1", device="meta", row_begin=5, row_end=20)
    assert meta.row_ids.shape == (15,)
    meta.to_empty(device="cpu")
    meta.load_state_dict(state_of(index))
    torch.testing.assert_close(state_of(meta), state_of(index), rtol=0, atol=0)
    index.mark_used()
    assert index.row_state.tolist() == [0] * 5 + [1] * 3 + [2] * 7
    index.reset()
    assert len(index) == 0


# States


@pytest.mark.parametrize("dense_rows", [0, 3, 5000])
def test_counts_of_slices(dense_rows: int) -> None:
    """The first slice has the statistics of the table; what slices have counted goes to whoever has the parts then."""
    config = HashConfig(dense_rows=dense_rows, buckets=6).resolve(dense_rows + 40, False)
    parts = min(dense_rows, 1024) + 6
    whole = {"counts": torch.arange(1, 7) * 7, SLICE_COUNTS: torch.zeros(parts, 5, dtype=torch.int64)}
    expected = [7, *(7 * k for k in range(2, 7))]
    for worlds in itertools.product((1, 2, 3, 7), repeat=2):
        state = whole
        for world in worlds:
            cuts = [cut for cut in itertools.pairwise(row_cuts(config, world)) if cut[0] < cut[1]]
            pieces = [slice_state(config, state, *cut) for cut in cuts]
            assert [piece["counts"][0] for piece in pieces] == [7] * len(pieces)
            own = [folded(piece)["counts"] for piece in pieces]
            saved = [spread(config, counts, *cut) for counts, cut in zip(own, cuts, strict=True)]
            assert [piece.sum(dim=0).tolist() for piece in saved] == [counts[1:].tolist() for counts in own]
            state = {"counts": torch.tensor([7, 0, 0, 0, 0, 0]), SLICE_COUNTS: torch.cat(saved)}
            assert state[SLICE_COUNTS].shape == (parts, 5)
            again = [folded(slice_state(config, state, *cut))["counts"] for cut in cuts]
            assert torch.equal(torch.stack(again), torch.stack(own)), "the same slices have what they had"
            joined = join_states(pieces)
            assert joined["counts"].tolist() == expected
            assert not bool(joined[SLICE_COUNTS].any())
    assert whole["counts"].tolist() == expected, "a copy"


def spread(config: ResolvedHashConfig, counts: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """As the state of a sharded table has the counts of a slice."""
    of_slice = SliceCounts(config, begin, end)
    of_slice.take(counts, None)
    return of_slice.of_parts


def test_slices_of_dense_rows_keep_their_counts() -> None:
    config = HashConfig(dense_rows=5000, buckets=2).resolve(6000, False)
    cuts = [*itertools.pairwise(row_cuts(config, 6))]
    saved = [spread(config, torch.tensor([4, 10 + number, 0, 0, 0, 0]), *cut) for number, cut in enumerate(cuts)]
    state = {"counts": torch.tensor([4, 0, 0, 0, 0, 0]), SLICE_COUNTS: torch.cat(saved)}
    counts = [folded(slice_state(config, state, *cut))["counts"].tolist() for cut in cuts]
    assert counts == [[4, 10 + number, 0, 0, 0, 0] for number in range(6)]


def test_counts_are_divided_where_they_are_whatever_the_default_device() -> None:
    config = HashConfig(dense_rows=4, buckets=6).resolve(44, False)
    counts = torch.arange(1, 7) * 7
    with torch.device("meta"):
        saved = spread(config, counts, 0, 44)
        piece = slice_state(config, {"counts": counts}, 0, 44)
    assert saved.sum(dim=0).tolist() == counts[1:].tolist()
    assert piece["counts"].tolist() == counts.tolist()


def test_the_state_with_the_highest_number_of_batches_has_that_of_the_table() -> None:
    pieces = [{"counts": torch.tensor([batches, 1, 2, 3, 4, 5])} for batches in (1, 9, 1)]
    assert join_states(pieces)["counts"].tolist() == [9, 3, 6, 9, 12, 15]


def test_a_slice_refuses_the_state_of_another() -> None:
    whole = HashIndex(40, config=HashConfig(buckets=4), name="t1")
    whole.insert(torch.arange(20))
    index = HashIndex(40, config=whole.config, name="t1", row_begin=20, row_end=40)
    right, wrong = (slice_state(whole.config, whole.state_dict(), begin, begin + 20) for begin in (20, 0))
    index.buffers_of(right)
    for state, reason in ((wrong, "wrong_bucket"), (whole.state_dict(), "rows_mismatch")):
        assert_refused(index, state, reason)
    assert fit_rows(index, right) == (right, None)


def test_more_rows_in_a_slice() -> None:
    """The second half of a table of 40 rows becomes that of one of 80, and so does the whole of it."""
    config = HashConfig(buckets=4, on_full="evict", admit_after=2)
    whole = HashIndex(40, config=config, name="t1")
    whole.insert(torch.tensor([*range(100, 120), *range(100, 115)]))
    saved = state_of(whole)
    fitted, _ = fit_rows(HashIndex(80, config=config, name="t1"), saved)
    index = HashIndex(80, config=config, name="t1", row_begin=40, row_end=80)
    by_slices, move = fit_rows(index, slice_state(whole.config, saved, 20, 40))
    expected = slice_state(index.config, fitted, 40, 80)  # type: ignore[arg-type]
    assert move is not None
    for key in ("row_ids", "row_state", "row_scores", "candidate_ids", "candidate_counts", "candidate_order"):
        assert torch.equal(by_slices[key], expected[key]), key  # type: ignore[arg-type]
    index.buffers_of(by_slices)
    with refused("wrong_bucket", error=CheckpointError):
        fit_rows(index, slice_state(whole.config, saved, 0, 20))


# Lookups


@pytest.mark.parametrize("unseen", ["zeros", "share"])
def test_pooling_over_slices(unseen: Any) -> None:
    config = HashConfig(dense_rows=10, buckets=5, unseen=unseen).resolve(60, False)
    whole = HashIndex(60, config=config)
    whole.insert(torch.arange(100, 125))
    weight = torch.randn(60, 4)
    ids = torch.cat([torch.arange(-5, 30), torch.arange(90, 140)])
    offsets = torch.tensor([0, 7, 7, 50, ids.numel()])
    (pooled,), rows, _ = find_and_pool(ids, offsets, [weight], [0], [whole.view()])
    total, rows_found = torch.zeros_like(pooled), torch.full_like(rows, -1)
    for index in Slices(config, row_cuts(config, 4), state_of(whole)).indexes:
        shard = weight[index.policy.row_begin : index.policy.row_end].contiguous()
        (own_pooled,), own_rows, own_absent = find_and_pool(ids, offsets, [shard], [0], [index.view()])
        total += own_pooled
        assert bool((own_rows < index.policy.own_rows).all())
        has_row = own_rows >= 0
        assert bool((rows_found[has_row] == -1).all()), "an id has rows in two slices"
        rows_found[has_row] = own_rows[has_row] + index.policy.row_begin
        has_id = index.find(ids) >= 0
        assert int(own_absent) == int((~has_id).sum())
    assert torch.equal(rows_found, rows)
    torch.testing.assert_close(total, pooled)
