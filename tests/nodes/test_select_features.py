"""``select_features`` remembers where keys stand, by the batch's whole key order."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recfx
from tests.builders.batches import bags
from tests.builders.collections import one_table

IDS = {"a": [1, 2], "b": [3], "c": [0, 4, 5], "unused": [99, 98]}


def batch(keys: str | list[str]) -> KeyedJaggedTensor:
    """One sample; each feature has the same ids whatever the order."""
    return bags({key: [IDS[key]] for key in keys})


@pytest.mark.parametrize("hashing", [None, recfx.HashConfig(dense_rows=0)], ids=["adopted", "hashed"])
def test_batches_of_several_key_orders(hashing: recfx.HashConfig | None) -> None:
    plain = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["a", "b"]),
            EmbeddingBagConfig(name="u", num_embeddings=10, embedding_dim=2, feature_names=["c"]),
        ]
    )
    converted = recfx.convert(plain, hashing=hashing)
    first = ["a", "b", "c"]
    wanted = (converted if hashing else plain)(batch(first))
    for keys in (first, ["c", "a", "b"], first, ["b", "unused", "c", "a"], ["c", "a", "b"], first):
        found = converted(batch(keys))
        assert found.keys() == wanted.keys() == first
        torch.testing.assert_close(found.values(), wanted.values(), rtol=1e-6, atol=1e-6)
    assert not torch.equal(wanted["a"], wanted["b"])


def test_orders_of_the_same_length_are_told_apart() -> None:
    node = recfx.nodes.select_features.SelectFeatures("", recfx.convert(_two()).tables, False)
    for keys in (["a", "b"], ["b", "a"], ["a", "b"]):
        selected = node(batch(keys))
        assert selected.keys() == ["a", "b"]
        assert selected.values().tolist() == IDS["a"] + IDS["b"]
        assert selected.lengths().tolist() == [2, 1]


def test_ever_new_orders_do_not_pile_up() -> None:
    """Neither here nor in what is kept per order; one that keeps coming is worked out once."""
    node = recfx.nodes.select_features.SelectFeatures("", recfx.convert(_two()).tables, False)
    usual = ["a", "b"]
    node(batch(usual))
    (worked_out,) = node._orders.values()
    for number in range(100):
        excess = [f"excess_{number}", "b", "a"]
        values = torch.tensor([7, *IDS["b"], *IDS["a"]])
        assert node(KeyedJaggedTensor(excess, values, lengths=torch.tensor([1, 1, 2]))).values().tolist() == [1, 2, 3]
        assert node(batch(usual)).values().tolist() == [1, 2, 3]
    assert len(node._orders) < 20
    assert node._orders[tuple(usual)] is worked_out


def _two() -> EmbeddingBagCollection:
    return one_table(["a", "b"])
