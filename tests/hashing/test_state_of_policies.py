"""Scores, candidates and counts in the state: saving, loading under another policy, loading in place, copies."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from recfx.errors import CheckpointError
from recfx.hashing import HashConfig, HashIndex
from tests.hashing.strategies import State, assert_refused, change, put, state_of
from tests.support.refusals import refused

FULL = {"on_full": "evict", "evict": "lfu", "admit_after": 3}


def filled(rows: int = 20, name: str = "t1", **config: Any) -> HashIndex:
    """Ids 100 to 111 have rows: 100 to 103 of the third batch, the others of the first; 200 to 204 wait."""
    index = HashIndex(rows, config=HashConfig(**(config or FULL)), name=name)
    index.insert(torch.arange(100, 112).repeat(3))
    index.insert(torch.arange(200, 205))
    index.insert(torch.arange(100, 104))
    return index


def assert_same(left: HashIndex, right: HashIndex) -> None:
    for (key, value), (other_key, twin) in zip(left.state_dict().items(), right.state_dict().items(), strict=True):
        assert key == other_key
        assert torch.equal(value, twin), key
    ids = torch.arange(90, 300)
    assert torch.equal(left.find(ids), right.find(ids))
    for ids, other_ids in zip(left.candidates(), right.candidates(), strict=True):
        assert torch.equal(ids, other_ids)


def assert_lives_on_alike(left: HashIndex, right: HashIndex) -> None:
    """The next batches find, admit and evict the same."""
    for step in range(8):
        ids = torch.arange(98 + 3 * step, 106 + 3 * step) + torch.tensor([0, 90]).repeat(4)
        for rows, other_rows in zip(left.insert(ids), right.insert(ids), strict=True):
            assert torch.equal(rows, other_rows)
    assert_same(left, right)


def loaded(state: State, rows: int = 20, name: str = "t1", **config: Any) -> HashIndex:
    index = HashIndex(rows, config=HashConfig(**config), name=name)
    index.load_state_dict(state)
    return index


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (change("identity", lambda t: t[:1]), "torn_state"),
        (change("identity", lambda t: t.to("meta")), "torn_state"),
        (put("identity", 0, 5), "wrong_table"),
        (put("identity", 1, 5), "wrong_seed"),
        (put("identity", 2, 4), "dense_rows_mismatch"),
        (put("counts", 0, 1 << 36), "torn_state"),
        (put("counts", 3, -1), "torn_state"),
        (change("counts", lambda t: t[:5]), "torn_state"),
        (change("counts", lambda t: t.int()), "torn_state"),
        (change("row_scores", lambda t: t[:-1]), "torn_state"),
        (change("row_scores", lambda t: t.float()), "torn_state"),
        (put("row_scores", 3, -4), "torn_state"),
        (put("row_scores", 3, (1 << 36) + 4), "torn_state"),
        (put("counts", 0, 2), "torn_state"),
        (lambda s: s.pop("candidate_order"), "torn_state"),
        (lambda s: s.pop("candidate_ids"), "torn_state"),
        (change("candidate_counts", lambda t: t.long()), "torn_state"),
        (change("candidate_ids", lambda t: t[:4]), "torn_state"),
        (put("candidate_counts", 2, -1), "torn_state"),
        (put("candidate_order", 2, -1), "torn_state"),
        (put("candidate_order", 2, 4 << 31), "torn_state"),
        (put("candidate_ids", 1, 100), "duplicate_id"),
        (put("candidate_ids", 1, 200), "duplicate_id"),
    ],
)
def test_damaged_state_changes_nothing(damage: Callable[[State], None], reason: str) -> None:
    index, state = filled(), state_of(filled())
    index.insert(torch.arange(500, 504).repeat(3))
    damage(state)
    assert_refused(index, state, reason)


@pytest.mark.parametrize("score", [4, (1 << 36) + 1, -1])
def test_scores_of_lru_that_cannot_be(score: int) -> None:
    state = state_of(filled(on_full="evict"))
    state["row_scores"][2] = score
    assert_refused(filled(on_full="evict"), state, "torn_state")


def test_a_candidate_must_be_in_its_bucket_and_not_dense() -> None:
    config = {**FULL, "buckets": 2}
    state = state_of(filled(**config))
    places = torch.nonzero(state["candidate_counts"]).squeeze(1)
    first, last = int(places[0]), int(places[-1])
    assert first < 10 <= last, "all candidates are of one bucket"
    state["candidate_ids"][[first, last]] = state["candidate_ids"][[last, first]]
    assert_refused(filled(**config), state, "wrong_bucket")
    config = {**FULL, "dense_rows": 4}
    state = state_of(filled(**config))
    state["candidate_ids"][4] = 3
    assert_refused(filled(**config), state, "dense_id")


def test_a_renamed_table_loads_without_the_identity() -> None:
    state = state_of(filled())
    assert_refused(filled(name="t2"), state, "wrong_table")
    state.pop("identity")
    index = loaded(state, name="t2", **FULL)
    assert torch.equal(index.items()[0], filled().items()[0])
    assert index.state_dict()["identity"].tolist() == HashIndex(3, name="t2").state_dict()["identity"].tolist()


@pytest.mark.parametrize(
    "config",
    [
        FULL,
        {"on_full": "evict"},
        {"on_full": "evict", "evict": "lfu", "buckets": 2, "dense_rows": 2},
        {"on_full": "share", "admit_after": 2},
    ],
)
def test_a_loaded_index_lives_on_as_the_saved_one(config: dict[str, Any]) -> None:
    index = filled(**config)
    index.erase(torch.tensor([105, 202]))
    copies = [
        loaded(state_of(index), **config),
        copy.deepcopy(index),
        pickle.loads(pickle.dumps(index)),
        nn.Sequential(copy.deepcopy(index)).share_memory()[0],
    ]
    on_meta = HashIndex(20, config=HashConfig(**config), name="t1", device="meta")
    on_meta.load_state_dict(state_of(index), assign=True)
    file = io.BytesIO()
    torch.save(index, file)
    file.seek(0)
    for again in (*copies, on_meta, torch.load(file, weights_only=False)):
        assert_same(index, again)
        assert_lives_on_alike(copy.deepcopy(index), again)


def test_to_empty_forgets_scores_and_candidates() -> None:
    for index in (filled(), HashIndex(20, config=HashConfig(**FULL), name="t1", device="meta")):
        index.to_empty(device="cpu")
        assert_same(index, HashIndex(20, config=HashConfig(**FULL), name="t1"))
        assert_lives_on_alike(index, HashIndex(20, config=HashConfig(**FULL), name="t1"))


# The state of one policy under another


def evicted(index: HashIndex, count: int) -> set[int]:
    """Who goes when so many new ids come to a full index."""
    free = index.occupancy().rows - len(index)
    times = index.config.admit_after
    return set(index.insert(torch.arange(900, 900 + free + count).repeat(times)).evicted_ids.tolist())


def test_lru_becomes_lfu_and_comes_back() -> None:
    """Batches stay known; what was not counted starts with one sighting."""
    lru = filled(on_full="evict")
    as_lfu = loaded(state_of(lru), on_full="evict", evict="lfu")
    rows = as_lfu.items()[1]
    assert (as_lfu.row_scores[rows] >> 36).unique().tolist() == [1]
    as_lfu.insert(torch.arange(104, 112))
    assert evicted(copy.deepcopy(as_lfu), 9) == {100, 101, 102, 103, *range(200, 205)}
    back = loaded(state_of(as_lfu), on_full="evict")
    assert back.row_scores[back.find(torch.tensor([100, 104, 200]))].tolist() == [3, 4, 2]
    assert evicted(back, 9) == {*range(200, 205), 100, 101, 102, 103}


def test_evicting_state_in_an_index_that_does_not_evict_and_back() -> None:
    source = filled()
    plain = loaded(state_of(source))
    assert set(plain.state_dict()) == {"row_ids", "row_state", "counts", "slice_counts", "identity"}
    assert torch.equal(plain.items()[0], source.items()[0])
    plain.insert(torch.arange(300, 302))
    for evict in ("lru", "lfu"):
        back = loaded(state_of(plain), **{**FULL, "evict": evict})
        assert torch.equal(back.items()[0], plain.items()[0])
        assert back.candidates()[0].numel() == 0
        assert back.counters["batches"] == 4, "the clock goes on"
        back.insert(torch.arange(100, 112))
        assert evicted(back, 2) == {300, 301}


def test_ids_whose_age_was_not_saved_expire_from_the_load_on() -> None:
    plain = loaded(state_of(filled()))
    ttl = loaded(state_of(plain), on_full="evict", evict="ttl", ttl_batches=1)
    known, again = plain.items()[0], torch.tensor([100])
    assert ttl.insert(again).evicted_ids.tolist() == []
    assert sorted(ttl.insert(again).evicted_ids.tolist()) == [id_ for id_ in sorted(known.tolist()) if id_ != 100]


def test_ages_that_another_rule_has_saved_count_on() -> None:
    for evict in ("lru", "lfu"):
        source = filled(on_full="evict", evict=evict)
        last = source.row_scores[source.items()[1]] & (2**36 - 1)
        ttl = loaded(state_of(source), on_full="evict", evict="ttl", ttl_batches=2)
        old = source.items()[0][last <= source.counters["batches"] - 2]
        assert 0 < old.numel() < len(source)
        assert sorted(ttl.insert(torch.tensor([900])).evicted_ids.tolist()) == sorted(old.tolist())


# Loading in place: torch.distributed.checkpoint writes into the tensors of state_dict()


class Model(nn.Module):
    def __init__(self, index: HashIndex) -> None:
        super().__init__()
        self.index = index


USES: list[Callable[[HashIndex], object]] = [
    lambda index: index.find(torch.arange(3)),
    lambda index: index.insert(torch.empty(0, dtype=torch.int64)),
    lambda index: copy.deepcopy(index),
    lambda index: index.answer(torch.arange(3)),
    lambda index: len(index),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("then_load_state_dict", [False, True])
@pytest.mark.parametrize("config", [{}, FULL], ids=["share", "evict"])
def test_distributed_checkpoint_loads_in_place(
    tmp_path: Path, config: dict[str, Any], then_load_state_dict: bool
) -> None:
    source, target = filled(**(config or {"on_full": "share"})), filled(**(config or {"on_full": "share"}))
    target.insert(torch.arange(700, 708).repeat(3))
    dcp.save(Model(source).state_dict(), checkpoint_id=str(tmp_path), no_dist=True)
    model = Model(target)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    if then_load_state_dict:
        model.load_state_dict(state)
    ids = torch.arange(90, 800)
    assert torch.equal(target.find(ids), source.find(ids))
    assert_same(target, source)
    assert len(target) == len(source)
    assert target.occupancy() == source.occupancy()
    if config:
        assert_lives_on_alike(target, source)


@pytest.mark.parametrize("use", USES)
def test_whoever_uses_it_first_notices_what_was_written(use: Callable[[HashIndex], object]) -> None:
    source, target = filled(), filled()
    target.insert(torch.arange(700, 708).repeat(3))
    state = target.state_dict()
    for key, value in source.state_dict().items():
        state[key].copy_(value)
    for copied in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
        assert_lives_on_alike(copied, copy.deepcopy(source))
    used, expected = use(target), use(source)
    if isinstance(used, HashIndex) and isinstance(expected, HashIndex):
        assert_same(used, expected)
    assert_same(target, source)


def test_garbage_written_in_place_is_refused_at_the_next_use() -> None:
    index = filled()
    index.state_dict()["row_ids"][:2] = 100
    for use in USES:
        with refused("duplicate_id", error=CheckpointError):
            use(index)
    index.load_state_dict(filled().state_dict())
    assert_same(index, filled())


def test_the_index_does_not_mistake_its_own_writing_for_somebody_elses() -> None:
    """Adopting a state costs as much as loading it."""
    index = filled()
    before = index.adopted
    for step in range(5):
        index.insert(torch.arange(5 * step, 5 * step + 6).repeat(3)[:18])
        index.erase(torch.arange(step, step + 3))
        index.answer(torch.arange(10))
        index.state_dict()
        index.items()
    assert index.adopted == before
