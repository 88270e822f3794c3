"""A pass, and the kind of node that it inserts, are one file and one line each: a model runs through them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType

import recfx
from recfx.ir.node_kinds import NODE_KINDS
from recfx.nodes.lower_graph import MAKERS
from recfx.rewrites.base import Rewrite
from tests.toys.count_ids import COUNT_IDS, CountIds, insert_count_ids, make

BATCH = KeyedJaggedTensor(["f", "g"], torch.tensor([3, 0, 3, 9, 1]), lengths=torch.tensor([2, 0, 1, 1, 0, 1]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=10, feature_names=["f"]),
                EmbeddingBagConfig(
                    name="b", embedding_dim=3, num_embeddings=10, feature_names=["g"], pooling=PoolingType.MEAN
                ),
            ]
        )
        self.over = nn.Linear(7, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features).values())


@pytest.fixture(autouse=True)
def one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NODE_KINDS, COUNT_IDS.name, COUNT_IDS)
    monkeypatch.setitem(MAKERS, COUNT_IDS.name, make)
    expand, *rest = recfx.passes()
    longer = (expand, Rewrite("insert_count_ids", insert_count_ids), *rest)
    monkeypatch.setattr(recfx.passes, "passes", lambda: longer)


@pytest.mark.parametrize("hashing", [None, recfx.HashConfig(), recfx.HashConfig(dense_rows=0)])
@pytest.mark.parametrize("whole_graph", [False, True])
def test_a_model_runs_and_trains(hashing: recfx.HashConfig | None, whole_graph: bool) -> None:
    original = Model()
    model = recfx.convert(original, (BATCH,), hashing=hashing, whole_graph=whole_graph)
    (counting,) = (module for module in model.modules() if isinstance(module, CountIds))
    before = dict(counting.counts)
    output = model(BATCH)
    assert {key: counting.counts[key] - before[key] for key in before} == {"f": 3, "g": 2}
    if hashing != recfx.HashConfig(dense_rows=0):  # its rows are new: convert has compared it on mapped ids
        torch.testing.assert_close(output, original(BATCH), rtol=1e-5, atol=1e-6)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    output.sum().backward()
    optimizer.step()
    assert all(not torch.equal(new, old) for new, old in zip(model.parameters(), weights, strict=True))
    printed = recfx.trace(model, (BATCH,))
    assert "ebc_count_ids" in [node.name for node in printed.graph.nodes]


def test_the_graph_shows_it() -> None:
    converted = recfx.convert(Model()).ebc
    text = {record.name: record.text for record in converted.pass_records}
    assert "ebc_count_ids = count_ids(ebc_select_features) {keys=[f, g]}" in text["insert_count_ids"]
    assert "count_ids" not in text["expand_collection"]
    assert "count_ids" in text["lower"]
