"""Saved states: what a plain model saved, a converted one loads, strictly; and the way back."""

from __future__ import annotations

import copy

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

import recfx
from tests.builders.batches import bags, one_bag
from tests.builders.collections import one_table, tables_named


def test_adopted_tables_save_the_plain_keys_and_load_both_ways() -> None:
    plain, other = one_table(), one_table()
    converted = recfx.convert(plain)
    assert list(converted.state_dict()) == list(plain.state_dict())
    converted.load_state_dict(other.state_dict(), strict=True)
    assert torch.equal(converted.weight("t"), other.embedding_bags["t"].weight)
    third = one_table()
    third.load_state_dict(converted.state_dict(), strict=True)
    assert torch.equal(third.embedding_bags["t"].weight, other.embedding_bags["t"].weight)


def test_a_plain_state_makes_an_index_empty() -> None:
    converted = recfx.convert(one_table(), hashing=recfx.HashConfig(dense_rows=0))
    converted(one_bag(7_000_000_000))
    assert len(converted.index("t")) == 1
    with pytest.warns(UserWarning, match="forgets its 1 ids"):
        converted.load_state_dict(one_table().state_dict(), strict=True)
    assert len(converted.index("t")) == 0


def test_a_state_with_fewer_rows_fills_the_first() -> None:
    plain = one_table()
    converted = recfx.convert(one_table(), hashing=recfx.HashConfig(rows=16))
    converted(one_bag(3, 123_456_789_012))
    tail = converted.weight("t")[10:].detach().clone()
    with pytest.warns(UserWarning, match="forgets its 1 ids"):
        converted.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(converted.weight("t")[:10], plain.embedding_bags["t"].weight)
    assert torch.equal(converted.weight("t")[10:], tail)


def test_an_indexed_state_comes_back_exactly() -> None:
    converted = recfx.convert(one_table(), hashing=recfx.HashConfig(dense_rows=0))
    ids = (-(2**63), -1, 0, 2**63 - 1, 5)
    first = converted(one_bag(*ids)).values()
    fresh = recfx.convert(one_table(), hashing=recfx.HashConfig(dense_rows=0)).eval()
    assert bool((fresh(one_bag(*ids)).values() == 0).all())
    fresh.load_state_dict(copy.deepcopy(converted.state_dict()), strict=True)
    assert torch.equal(fresh(one_bag(*ids)).values(), first)


def test_a_meta_model_is_placed_and_initialised() -> None:
    plain = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])],
        device=torch.device("meta"),
    )
    converted = recfx.convert(plain, device="cpu")
    weight = converted.weight("t")
    assert weight.device.type == "cpu"
    assert 0 < float(weight.detach().abs().max()) <= 10**-0.5
    torch.testing.assert_close(converted(one_bag(1, 2)).values(), weight[[1, 2]].sum(0, keepdim=True))
    hashed = recfx.convert(plain, hashing=recfx.HashConfig(dense_rows=0), device="cpu")
    hashed(one_bag(-5))
    assert len(hashed.index("t")) == 1


@pytest.mark.parametrize("damaged", ["a", "b"])
def test_a_state_with_one_damaged_index_changes_no_table(damaged: str) -> None:
    converted, other = (recfx.convert(tables_named("a", "b"), hashing=recfx.HashConfig(dense_rows=0)) for _ in range(2))
    converted(bags({"a": [[5, 6]], "b": [[7]]}))
    other(bags({"a": [[-1, -2]], "b": [[-3, -4]]}))
    state = copy.deepcopy(other.state_dict())
    row_ids = state[f"hash_indexes.{damaged}.row_ids"]
    row_ids[1] = row_ids[0]
    before = copy.deepcopy(converted.state_dict())
    with pytest.raises(recfx.CheckpointError) as caught:
        converted.load_state_dict(state)
    assert caught.value.reason == "duplicate_id"
    assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())
