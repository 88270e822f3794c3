"""What an index counts of batches that bring ids with and without rows together."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from tests.builders.collections import table


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_resident_ids_count_beside_new_ones(backend: str) -> None:
    plain = EmbeddingBagCollection([table("t1", ["f1"]), table("t2", ["f2"])])
    converted = recfx.convert(plain, hashing=recfx.HashConfig(dense_rows=0), backend=backend)

    def batch(first: list[int], second: list[int]) -> None:
        ids = torch.tensor(first + second)
        converted(KeyedJaggedTensor(["f1", "f2"], ids, lengths=torch.tensor([len(first), len(second)])))

    batch([1, 2], [7])
    batch([2, 2, 3], [7, 7])
    batch([1], [])
    counters = [converted.index(name).counters for name in ("t1", "t2")]
    assert [counters[i]["batches"] for i in range(2)] == [3, 3]
    assert [counters[i]["ids_seen"] for i in range(2)] == [6, 3]
    assert [counters[i]["inserted"] for i in range(2)] == [3, 1]
