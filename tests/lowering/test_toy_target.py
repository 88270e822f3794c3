"""A kernel target is one file and one line of the registry: a model runs and trains through it."""

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recfx
from recfx.lowering import registry
from recfx.lowering.registry import Backend

BATCH = KeyedJaggedTensor(["f", "g"], torch.tensor([3, 0, 3, 9, 1]), lengths=torch.tensor([2, 0, 1, 1, 0, 1]))


def tables(rows: int = 10) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name="a", embedding_dim=4, num_embeddings=10, feature_names=["f"]),
            EmbeddingBagConfig(name="b", embedding_dim=3, num_embeddings=rows, feature_names=["g"]),
        ]
    )


@pytest.fixture(autouse=True)
def one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", (Backend("loop", "tests.toys.loop_target"), *registry.BACKENDS))


@pytest.mark.parametrize("hashing", [None, recfx.HashConfig(), recfx.HashConfig(dense_rows=0, rows=32)])
def test_a_model_runs_and_trains(hashing: recfx.HashConfig | None) -> None:
    standard = tables()
    converted = recfx.convert(standard, (BATCH,), hashing=hashing)
    assert all(choice == "loop" for choice in kernels(converted))
    assert "kernel=loop" in str(converted.pass_records[-1].text)
    if hashing is not None and hashing.dense_rows == 0:
        return  # its rows are new: convert has compared it with the original on mapped ids
    for model in (standard, torch.compile(converted, backend="eager")):  # in which its kernels are no part of a graph
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            (model(BATCH).values() ** 2).sum().backward()
            optimizer.step()
    for ours, theirs in zip(converted.parameters(), standard.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_it_declines_goes_to_the_next_target() -> None:
    converted = recfx.convert(tables(rows=2000))
    assert set(kernels(converted)) == {"cpu"}, "one lookup serves both tables, so that both go"
    declined = [decline for record in converted.pass_records for decline in record.declined if decline.by == "loop"]
    assert [decline.code for decline in declined] == ["too_many_rows"]


def kernels(converted: nn.Module) -> list[str]:
    (collection,) = recfx.explain(converted).collections
    return [node.kernel for node in collection.nodes if node.kind in ("lookup", "hash_lookup")]
