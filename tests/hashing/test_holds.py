"""What an index says of ids and of its own changes, fact by fact: its part of the ids, removals, meta, devices."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection

import recfx
from recfx.errors import CheckpointError
from recfx.hashing import HashConfig, HashIndex
from recfx.hashing.row_move import RowMove, fit_rows
from recfx.hashing.slices import join_states, row_cuts, slice_state
from tests.builders.collections import two_tables

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
