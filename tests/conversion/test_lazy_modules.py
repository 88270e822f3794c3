"""Models with lazy modules, whose parameters have no size before the first call: they are verified all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torchrec import KeyedJaggedTensor

import recfx
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from tests.builders.batches import batch
from tests.builders.collections import collection


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.over, self.norm = collection(), nn.LazyLinear(3), nn.LazyBatchNorm1d()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.norm(self.ebc(features).values()))


@pytest.mark.parametrize(
    "options",
    [{}, {"inplace": True}, {"verify": True}, {"hashing": recfx.HashConfig(dense_rows=0)}],
    ids=["copy", "inplace", "asked", "hashed"],
)
def test_a_lazy_model_is_verified_and_stays_lazy(options: dict[str, Any]) -> None:
    model = Lazy()
    converted = recfx.convert(model, (batch(4),), **options)
    assert recfx.explain(converted).verification.ok
    for one in (model, converted):
        assert isinstance(one.over.weight, UninitializedParameter)
        assert isinstance(one.norm.running_mean, UninitializedBuffer)
    for _ in range(2):
        converted(batch(4)).sum().backward()
    assert converted.over.weight.shape == (3, 24)
    assert isinstance(converted.ebc, HashEmbeddingBagCollection)
