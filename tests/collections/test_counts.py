"""What an index counts of batches that bring ids with and without rows together."""

from __future__ import annotations

import pytest
from torchrec import EmbeddingBagCollection

import recfx
from tests.builders.batches import bags
from tests.builders.collections import table


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_resident_ids_count_beside_new_ones(backend: str) -> None:
    plain = EmbeddingBagCollection([table("t1", ["f1"]), table("t2", ["f2"])])
    converted = recfx.convert(plain, hashing=recfx.HashConfig(dense_rows=0), backend=backend)

    def batch(first: list[int], second: list[int]) -> None:
        converted(bags({"f1": [first], "f2": [second]}))

    batch([1, 2], [7])
    batch([2, 2, 3], [7, 7])
    batch([1], [])
    counters = [converted.index(name).counters for name in ("t1", "t2")]
    assert [counters[i]["batches"] for i in range(2)] == [3, 3]
    assert [counters[i]["ids_seen"] for i in range(2)] == [6, 3]
    assert [counters[i]["inserted"] for i in range(2)] == [3, 1]
