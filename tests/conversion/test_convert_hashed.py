"""Raw 64-bit ids through ``convert``: who gets a row, what an id without one reads, and what a full table says."""

import copy

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.conversion.convert import convert
from recfx.hashing import HashConfig
from recfx.inspect.explain import explain
from tests.builders.collections import collection, table

RAW = HashConfig(dense_rows=0)


def flat_bags(lengths: list[int], ids: list[int], keys: list[str]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys, torch.tensor(ids, dtype=torch.int64), lengths=torch.tensor(lengths))


def one_table(
    hashing: HashConfig = RAW, *, rows: int = 20, pooling: PoolingType = PoolingType.SUM
) -> HashEmbeddingBagCollection:
    """``t1`` of ``f1``, converted."""
    converted = convert(
        EmbeddingBagCollection(tables=[table("t1", ["f1"], dim=4, rows=rows, pooling=pooling)]), hashing=hashing
    )
    assert isinstance(converted, HashEmbeddingBagCollection)
    return converted


def pooled(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """One bag of ``f1`` for each id."""
    return model(flat_bags([1] * len(ids), ids, ["f1"])).values().detach().clone()


def test_eval_inserts_nothing_and_unseen_ids_read_zeros() -> None:
    model = one_table()
    seen = pooled(model, [5, -7])
    model.eval()
    answer = pooled(model, [99, 5, 2**50, -7])
    assert torch.equal(answer, torch.stack([torch.zeros(4), seen[0], torch.zeros(4), seen[1]]))
    assert len(model.hash_indexes["t1"]) == 2
    assert model.hash_indexes["t1"].counters["unseen_answers"] == 2


def test_the_mean_counts_ids_without_a_row() -> None:
    model = one_table(pooling=PoolingType.MEAN)
    seen = pooled(model, [5, 6])
    model.eval()
    answer = model(flat_bags([3, 1, 0, 2], [5, 77, 6, 88, 5, 5], ["f1"])).values()
    expected = torch.stack([(seen[0] + seen[1]) / 3, torch.zeros(4), torch.zeros(4), seen[0]])
    torch.testing.assert_close(answer, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("hashing", [HashConfig(rows=50), HashConfig(rows=50, dense_rows=0)], ids=["adopted", "anew"])
def test_more_rows_than_the_table_has(hashing: HashConfig) -> None:
    standard = EmbeddingBagCollection(tables=[table("t1", ["f1"], dim=4)])
    trained = standard.embedding_bags["t1"].weight.detach().clone()
    model = convert(standard, hashing=hashing)
    weight = model.embedding_bags["t1"].weight
    assert weight.shape == (50, 4)
    assert "original_has_more_rows" in {reason.code for reason in explain(model).reasons}
    assert model.embedding_bag_configs()[0].num_embeddings == 50
    first = 20 if hashing.dense_rows is None else 0
    dense, raw = list(range(20)), [2**60 + i for i in range(30)]
    answer = pooled(model, dense + raw if first else raw)
    if first:
        assert torch.equal(answer[:20], trained)
    ids, rows = model.hash_indexes["t1"].items()
    assert sorted(ids.tolist()) == raw
    assert rows.min() >= first
    assert len(set(map(tuple, answer.tolist()))) == len(answer)


def test_two_conversions_of_one_model_share_its_weights_unless_it_is_copied() -> None:
    original = EmbeddingBagCollection(tables=[table("t1", ["f1"], dim=4)])
    first, second, third = (convert(source, hashing=RAW) for source in (original, original, copy.deepcopy(original)))
    weight = original.get_parameter("embedding_bags.t1.weight")
    assert first.weight("t1") is second.weight("t1") is weight
    assert third.weight("t1") is not weight
    pooled(first, [7])
    pooled(second, [8])
    rows = [model.index("t1").find(torch.tensor([id_])).item() for model, id_ in ((first, 7), (second, 8))]
    assert rows == [0, 0]


def test_one_table_hashed_beside_one_adopted() -> None:
    """By name; a MEAN and a SUM table in one lookup."""
    standard = collection()
    oracle = copy.deepcopy(standard)
    model = convert(standard, hashing={"t1": RAW})
    assert list(model.hash_indexes) == ["t1"]
    features = flat_bags([1, 2, 1, 2, 0, 1], [2**50, -9, 2**50, 3, 4, 5, 6], ["f1", "f2", "f3"])
    output = model(features)
    ids, rows = model.hash_indexes["t1"].items()
    row_of = dict(zip(ids.tolist(), rows.tolist(), strict=True))
    mapped = torch.tensor([*(row_of[i] for i in [2**50, -9, 2**50]), 3, 4, 5, 6])
    with torch.no_grad():
        oracle.embedding_bags["t1"].weight.copy_(model.embedding_bags["t1"].weight)
    expected = oracle(KeyedJaggedTensor(features.keys(), mapped, lengths=features.lengths()))
    torch.testing.assert_close(output.values(), expected.values(), rtol=1e-5, atol=1e-6)
