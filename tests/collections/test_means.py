"""MEAN tables with an index beside adopted ones: only the former are divided after their lookup."""

from __future__ import annotations

import pytest
import torch
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.conversion.convert import convert
from recfx.hashing import HashConfig
from tests.builders.batches import bags
from tests.builders.collections import table

RAW = {7: 10**12, 8: -3, 9: 2**40}  # what the hashed tables see instead of the oracle's rows
BAGS = {
    "hashed_mean": [[7, 8, 8], [9]],
    "adopted_mean": [[0, 1, 2, 3], [4, 4]],
    "hashed_sum": [[8, 9], [7, 7, 9]],
    "adopted_sum": [[5, 6, 5], []],
}


def collection(width: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            table(name, [name], dim=width + position, pooling=PoolingType.MEAN if "mean" in name else PoolingType.SUM)
            for position, name in enumerate(BAGS)
        ]
    )


def features(names: dict[int, int]) -> KeyedJaggedTensor:
    return bags({key: [[names.get(id_, id_) for id_ in bag] for bag in each] for key, each in BAGS.items()})


@pytest.mark.parametrize("hashing", [HashConfig(), None], ids=["adopted", "static"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_outputs_and_gradients(hashing: HashConfig | None, training: bool) -> None:
    plain = collection(3)
    own = EmbeddingBagCollection(tables=plain.embedding_bag_configs())
    own.load_state_dict(plain.state_dict())
    raw = HashConfig(dense_rows=0)
    converted = convert(own, hashing={name: raw if name.startswith("hashed") else hashing for name in BAGS})
    with torch.no_grad():
        converted(features(RAW))
        for name in ("hashed_mean", "hashed_sum"):
            rows = converted.index(name).find(torch.tensor(list(RAW.values())))
            converted.weight(name)[rows] = plain.embedding_bags[name].weight[list(RAW)]
    converted.train(training)
    found, wanted = converted(features(RAW)), plain(features({}))
    torch.testing.assert_close(found.values(), wanted.values(), rtol=1e-5, atol=1e-6)
    for each in (found, wanted):
        (each.values() * torch.linspace(-1, 2, each.values().numel()).view_as(each.values())).sum().backward()
    for name, bag in plain.embedding_bags.items():
        gradient = converted.weight(name).grad
        if name.startswith("hashed"):
            rows = converted.index(name).find(torch.tensor(list(RAW.values())))
            torch.testing.assert_close(gradient[rows], bag.weight.grad[list(RAW)], rtol=1e-5, atol=1e-6)
        else:
            torch.testing.assert_close(gradient, bag.weight.grad, rtol=1e-5, atol=1e-6)
