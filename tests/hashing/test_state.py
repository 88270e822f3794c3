"""Saving and loading an index, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recfx.errors import CheckpointError, TableFullError
from recfx.hashing import HashConfig, HashIndex
from recfx.hashing.slices import SLICE_COUNTS, join_states, slice_state
from tests.hashing.strategies import State, assert_refused, change, put, state_of


def filled(rows: int = 64, ids: range = range(100, 130), **config: Any) -> HashIndex:
    index = HashIndex(rows, config=HashConfig(**{"buckets": 2, **config}), name="t1")
    index.insert(torch.tensor([*ids, -1]))
    return index


ALWAYS = {
    "row_ids": (torch.int64, (64,)),
    "row_state": (torch.uint8, (64,)),
    "counts": (torch.int64, (6,)),
    "identity": (torch.int64, (4,)),
    "slice_counts": (torch.int64, (2, 5)),
}
SCORES = {"row_scores": (torch.int64, (64,))}
CANDIDATES = {
    "candidate_ids": (torch.int64, (64,)),
    "candidate_counts": (torch.int32, (64,)),
    "candidate_order": (torch.int64, (64,)),
}


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({}, ALWAYS),
        ({"on_full": "evict"}, ALWAYS | SCORES),
        ({"admit_after": 2}, ALWAYS | CANDIDATES),
        ({"on_full": "evict", "evict": "lfu", "admit_after": 2}, ALWAYS | SCORES | CANDIDATES),
    ],
)
def test_state_is_what_cannot_be_derived(config: dict[str, Any], keys: dict[str, Any]) -> None:
    state = filled(**config).state_dict()
    assert {key: (value.dtype, tuple(value.shape)) for key, value in state.items()} == keys
    assert (state["row_ids"][state["row_state"] == 0] == -1).all()


def test_loading_fills_in_place() -> None:
    """Copies made by convert(inplace=False) share these tensors."""
    target = filled(ids=range(3))
    tensors = dict(target._buffers)
    target.load_state_dict(state_of(filled()))
    assert all(target._buffers[key] is tensor for key, tensor in tensors.items())


def test_state_of_a_plain_table_means_an_empty_index() -> None:
    index = filled()
    model = nn.ModuleDict({"table": nn.EmbeddingBag(4, 2), "index": index})
    plain = {"table.weight": torch.zeros(4, 2)}
    assert model.load_state_dict(plain, strict=True).missing_keys == []
    assert len(index) == 0


def swap_buckets(state: State) -> None:
    state["row_ids"][[0, 32]] = state["row_ids"][[32, 0]]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda s: s.pop("row_state"), "torn_state"),
        (lambda s: s.pop("row_ids"), "torn_state"),
        (change("row_state", lambda t: t[:-1]), "torn_state"),
        (change("row_ids", lambda t: t.int()), "torn_state"),
        (change("row_ids", lambda t: t.view(2, 32)), "torn_state"),
        (change("row_ids", lambda t: t.to("meta")), "torn_state"),
        (change("row_ids", lambda t: "x"), "torn_state"),
        (put("row_state", 40, 7), "torn_state"),
        (put("row_ids", 1, 1), "wrong_bucket"),
        (swap_buckets, "wrong_bucket"),
        (lambda s: s["row_ids"].__setitem__(1, s["row_ids"][0].item()), "duplicate_id"),
    ],
)
def test_damaged_state_changes_nothing(damage: Callable[[State], None], reason: str) -> None:
    state = state_of(filled())
    damage(state)
    assert_refused(filled(ids=range(300, 310)), state, reason)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"seed": 1}, "wrong_seed"),
        ({"buckets": 8}, "wrong_bucket"),
        ({"buckets": 4}, "wrong_bucket"),
        ({"dense_rows": 20}, "dense_rows_mismatch"),
        ({"dense_rows": 20, "rows": 128}, "dense_rows_mismatch"),
        ({"dense_rows": 20, "rows": 40}, "dense_rows_mismatch"),
        ({"dense_rows": 0, "rows": 63}, "rows_mismatch"),
        ({"rows": 128}, "rows_mismatch"),
    ],
)
def test_state_of_another_index(config: dict[str, Any], reason: str) -> None:
    index = HashIndex(config.get("rows", 64), config=HashConfig(**{"buckets": 2, **config}), name="t1")
    assert_refused(index, state_of(filled()), reason)


def test_other_dense_rows_without_an_identity() -> None:
    state = state_of(filled())
    state.pop("identity")
    index = HashIndex(64, config=HashConfig(dense_rows=20, buckets=2), name="t1")
    assert_refused(index, state, "dense_id")


def test_dense_id_in_an_index_row() -> None:
    state = state_of(filled(dense_rows=4, buckets=1))
    state["row_ids"][10] = 3
    index = HashIndex(64, config=HashConfig(dense_rows=4, buckets=1), name="t1")
    assert_refused(index, state, "dense_id")


def test_more_rows_take_the_first_where_borders_allow_it() -> None:
    source = filled(buckets=1)
    target = HashIndex(100, config=HashConfig(buckets=1), name="t1")
    target.load_state_dict(source.state_dict())
    for left, right in zip(source.items(), target.items(), strict=True):
        assert torch.equal(left, right)
    assert target.insert(torch.arange(1000, 1069))[1][-1] == 99
    empty = HashIndex(100, config=HashConfig(buckets=4), name="t1")
    empty.load_state_dict(HashIndex(64, config=HashConfig(buckets=4), name="t1").state_dict())
    assert len(empty) == 0


# What slices of a table have counted


@pytest.mark.parametrize(
    "change",
    [lambda t: t.int(), lambda t: t[:, :4], lambda t: t[0], lambda t: t - 1, lambda t: t + (1 << 61), lambda t: t[:1]],
)
def test_slice_counts_that_cannot_be(change: Any) -> None:
    whole = HashIndex(40, config=HashConfig(buckets=4), name="t1")
    index = HashIndex(40, config=whole.config, name="t1", row_begin=20, row_end=40)
    state = slice_state(whole.config, whole.state_dict(), 20, 40)
    state[SLICE_COUNTS] = change(state[SLICE_COUNTS])
    assert_refused(index, state, "torn_state")


def test_a_whole_table_takes_what_slices_of_other_buckets_counted() -> None:
    index = HashIndex(40, config=HashConfig(buckets=4), name="t1")
    state = state_of(index)
    state[SLICE_COUNTS] = torch.arange(10).reshape(2, 5)
    index.load_state_dict(state)
    assert index.counts.tolist() == [0, 5, 7, 9, 11, 13]
    assert not bool(index.state_dict()[SLICE_COUNTS].any())
    pieces = [slice_state(index.config, state, *cut) for cut in ((0, 20), (20, 40))]
    assert join_states(pieces)["counts"].tolist() == [0, 5, 7, 9, 11, 13]


def test_states_that_do_not_belong_together() -> None:
    state = {"row_ids": torch.arange(6), "identity": torch.arange(3)}
    with pytest.raises(CheckpointError, match="different things"):
        join_states([state, {"row_ids": torch.arange(6)}])
    with pytest.raises(CheckpointError, match="different tables"):
        join_states([state, {**state, "identity": torch.zeros(3)}])


def test_the_row_of_unseen_ids_belongs_to_no_id() -> None:
    """An index that gives out every row saves an id in the last row of a bucket, which answers for others here."""
    source = filled(rows=16, ids=range(15), buckets=1)
    assert_refused(filled(rows=16, ids=range(3), buckets=1, unseen="row"), state_of(source), "kept_row_taken")
    ours = filled(rows=17, ids=range(15), buckets=1, unseen="row")
    assert sorted(ours.items()[1].tolist()) == [*range(16)]
    assert ours.answer(torch.tensor([3, 99, -7])).tolist() == [3, 16, 16]
    with pytest.raises(TableFullError):
        ours.insert(torch.tensor([99]))
