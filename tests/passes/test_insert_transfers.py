"""insert_transfers: nothing is copied where tables and indexes are on one device.

The graphs of collections on another device are in ``tests/ascend/npu_runtime/test_transfers.py``.
"""

from __future__ import annotations

import pytest

from recfx import HashConfig, HashEmbeddingBagCollection, HashEmbeddingBagConfig
from tests.passes.small_collection import ADOPTED, INDEXED, after, collection


@pytest.mark.parametrize("hashing", [(INDEXED, INDEXED), (ADOPTED, INDEXED), (ADOPTED, ADOPTED)])
def test_tables_on_the_host(hashing: tuple[HashConfig, HashConfig]) -> None:
    converted = collection(*hashing)
    _, before, _, _ = after("fuse_hash_lookup", converted)
    _, text, modified, declined = after("insert_transfers", converted)
    assert (text, modified, declined) == (before, False, [])


def test_tables_without_data() -> None:
    config = HashEmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"], hashing=INDEXED)
    _, text, modified, _ = after("insert_transfers", HashEmbeddingBagCollection([config], device="meta"))
    assert not modified
    assert "to_host" not in text
