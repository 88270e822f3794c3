"""insert_transfers: nothing is copied where tables and indexes are on one device.

The graphs of collections on another device are in ``tests/ascend/npu_runtime/test_transfers.py``.
"""

from __future__ import annotations

import pytest

from recfx import HashConfig, HashEmbeddingBagCollection
from tests.passes.small_collection import ADOPTED, INDEXED, after, collection, table


@pytest.mark.parametrize("hashing", [(INDEXED, INDEXED), (ADOPTED, INDEXED), (ADOPTED, ADOPTED)])
def test_tables_on_the_host(hashing: tuple[HashConfig, HashConfig]) -> None:
    converted = collection(*hashing)
    _, before, _, _ = after("fuse_hash_lookup", converted)
    _, text, modified, declined = after("insert_transfers", converted)
    assert (text, modified, declined) == (before, False, [])


def test_tables_without_data() -> None:
    converted = HashEmbeddingBagCollection([table("t", INDEXED)], device="meta")
    _, text, modified, _ = after("insert_transfers", converted)
    assert not modified
    assert "to_host" not in text
