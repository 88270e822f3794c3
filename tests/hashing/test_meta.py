"""An index on meta holds nothing: what asks it for ids gets none."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingBagCollection

import recfx
from recfx.hashing.index import Occupancy
from tests.builders.collections import two_tables


def on_meta() -> nn.Module:
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(two_tables(), device=torch.device("meta"))})
    return recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0, admit_after=2))


def test_an_index_on_meta_is_empty() -> None:
    index = on_meta()["ebc"].index("t1")
    assert len(index) == 0
    for ids, others in (index.items(), index.candidates()):
        assert (ids.shape, others.shape, ids.dtype, others.dtype) == ((0,), (0,), torch.int64, torch.int64)
        assert ids.device.type == others.device.type == "cpu"
    assert set(index.counters.values()) == {0}
    assert index.occupancy() == Occupancy(0, 20, 0, 0, 20)


def test_a_model_on_meta_goes_back() -> None:
    plain = recfx.unconvert(on_meta())
    assert type(plain["ebc"]) is EmbeddingBagCollection
    assert all(parameter.is_meta for parameter in plain.parameters())
    _, mapping = recfx.unconvert(on_meta(), with_mapping=True)
    assert {table: len(ids) for table, (ids, _) in mapping.items()} == {"t1": 0, "t2": 0}
    assert recfx.explain(on_meta()).ok
