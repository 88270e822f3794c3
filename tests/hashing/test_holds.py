"""Holds on rows, and many indexes at once."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection

import recfx
from recfx.errors import CheckpointError
from recfx.hashing import HashConfig, HashIndex
from recfx.hashing.index import views_of
from recfx.hashing.row_move import RowMove, fit_rows
from recfx.hashing.slices import join_states, row_cuts, slice_state
from recfx.kernels.index import hash_index
from recfx.kernels.index.index_buffers import IndexView
from tests.builders.collections import two_tables
from tests.support.refusals import refused

IDS = torch.arange(-300, 300) * 1_000_003


@pytest.mark.parametrize("pieces", [2, 3, 5])
@pytest.mark.parametrize("dense_rows", [0, 7])
def test_every_id_belongs_to_one_slice(pieces: int, dense_rows: int) -> None:
    """Also ids whose home is the first row of a slice, or the first after it."""
    whole = HashIndex(40, config=HashConfig(buckets=33, dense_rows=dense_rows))
    ids = torch.cat([torch.arange(dense_rows), IDS])
    slices = [
        HashIndex(40, config=whole.config, row_begin=begin, row_end=end)
        for begin, end in itertools.pairwise(row_cuts(whole.config, pieces))
    ]
    owners = torch.stack([part.holds(ids) for part in slices])
    assert torch.equal(owners.sum(0), torch.ones(len(ids), dtype=torch.int64))
    shared = whole.shared_rows(ids)
    for owned, part in zip(owners, slices, strict=True):
        here = part.shared_rows(ids)
        assert torch.equal(here[owned] + part.policy.row_begin, shared[owned])
        assert bool((here[~owned] == -1).all())


@pytest.mark.parametrize("admit_after", [1, 3])
def test_states_are_fitted_sliced_and_joined_under_another_default_device(admit_after: int) -> None:
    config = HashConfig(buckets=4, dense_rows=3, admit_after=admit_after)
    source, target = HashIndex(40, config=config), HashIndex(60, config=config)
    source.insert(torch.cat([IDS[:12], IDS[:6]]))
    saved = source.state_dict()

    def everything() -> tuple[Any, ...]:
        fitted, move = fit_rows(target, saved)
        pieces = [slice_state(source.config, saved, *rows) for rows in itertools.pairwise(row_cuts(source.config, 3))]
        assert move is not None
        return fitted, move.old_rows, move.new_rows, join_states(pieces), pieces, RowMove.keep_first(3).old_rows

    expected = everything()
    with torch.device("meta"):
        actual = everything()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert all(not tensor.is_meta for tensor in actual[0].values())


def test_an_index_that_expects_a_load_is_readable_by_what_is_about_to_load_it() -> None:
    index = HashIndex(8, name="t1")
    with index.readable():
        assert len(index) == 0
    index.insert(torch.tensor([5, 6]))
    index.expect_load()
    with pytest.raises(CheckpointError, match="load_interrupted"):
        len(index)
    with index.readable():
        assert len(index) == 2
    with pytest.raises(CheckpointError, match="load_interrupted"):
        len(index)
    index.load_state_dict(HashIndex(8, name="t1").state_dict())
    assert len(index) == 0


def test_loading_into_an_index_on_meta_warns_and_names_it() -> None:
    saved = HashIndex(8, name="t1").state_dict()
    index = HashIndex(8, name="t1", device="meta")
    with pytest.warns(UserWarning, match="^t1: the index is on the meta device, so loading is a no-op"):
        index.load_state_dict(saved)
    model = torch.nn.ModuleDict({"part": index})
    with pytest.warns(UserWarning, match=r"^part\.: the index is on the meta device"):
        model.load_state_dict({f"part.{key}": value for key, value in saved.items()})


def on_meta() -> nn.Module:
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(two_tables(), device=torch.device("meta"))})
    return recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0, admit_after=2))


def test_a_model_on_meta_goes_back() -> None:
    plain = recfx.unconvert(on_meta())
    assert type(plain["ebc"]) is EmbeddingBagCollection
    assert all(parameter.is_meta for parameter in plain.parameters())
    _, mapping = recfx.unconvert(on_meta(), with_mapping=True)
    assert {table: len(ids) for table, (ids, _) in mapping.items()} == {"t1": 0, "t2": 0}
    assert recfx.explain(on_meta()).ok


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
    return hash_index.find(torch.tensor(ids), view.slot_groups, view.side_row, 0).tolist()


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
