"""The views of many indexes at once: they are those of each index by itself, also after someone has written to it."""

from __future__ import annotations

import torch

from recfx.errors import CheckpointError
from recfx.hashing import HashConfig, HashIndex
from recfx.hashing.index import views_of
from recfx.kernels.index import hash_index
from recfx.kernels.index.index_buffers import IndexView
from tests.support.refusals import refused

RAW = HashConfig(dense_rows=0)


def index_of(*ids: int) -> HashIndex:
    index = HashIndex(64, config=RAW)
    index.find_or_insert(torch.tensor(ids))
    return index


def in_place(target: HashIndex, source: HashIndex) -> None:
    """As torch.distributed.checkpoint loads."""
    state = target.state_dict()
    for name, value in source.state_dict().items():
        state[name].copy_(value)


def found_in(view: IndexView, *ids: int) -> list[int]:
    rows: list[int] = hash_index.find(torch.tensor(ids), view.slot_groups, view.side_row, 0).tolist()
    return rows


def test_views_are_kept_until_a_state_is_written() -> None:
    indexes = [index_of(1, 2), index_of(3, 4)]
    first = views_of(indexes, False)
    assert all(again is view for again, view in zip(views_of(indexes, False), first, strict=True))
    in_place(indexes[1], index_of(50, 60, 70))
    views = views_of(indexes, False)
    assert views[0] is first[0]
    assert found_in(views[1], 50, 60, 70, 3) == [0, 1, 2, -1]


def test_an_index_follows_what_is_written_to_its_leader() -> None:
    leader, follower = index_of(1), HashIndex(64, config=RAW)
    follower.follow(leader)
    views_of([leader, follower], False)
    in_place(leader, index_of(50, 60))
    (view,) = views_of([follower], False)
    assert found_in(view, 50, 60, 1) == [0, 1, -1]


def test_a_load_that_was_interrupted_is_told() -> None:
    indexes = [index_of(1), index_of(2)]
    views_of(indexes, False)
    indexes[1].__dict__["_expects_load"] = True
    with refused("load_interrupted", error=CheckpointError):
        views_of(indexes, False)


def test_training_shares_no_rows() -> None:
    sharing = HashIndex(64, config=HashConfig(dense_rows=0, on_full="share", unseen="share"))
    for _ in range(2):  # made, and kept
        assert [view.share_buckets > 0 for mode in (False, True) for view in views_of([sharing], mode)] == [True, False]
