"""Models that were compiled before, lazy or tied."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor

import recfx
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from recfx.collections.sharding.shard import shard_collection
from recfx.conversion.convert import convert
from recfx.hashing import HashConfig
from tests.builders.batches import batch, raw_batch
from tests.builders.collections import collection, sequence_table, table
from tests.builders.optimizers import attach
from tests.models.handwritten import Tower
from tests.support.refusals import refused


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_a_compiled_model_is_really_converted(how: str, inplace: bool) -> None:
    """Compiled and run before: what was compiled is the original's code."""
    torch._dynamo.reset()
    model: nn.Module = Tower()
    if how == "torch.compile":
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    model(batch(4))
    converted = convert(model, hashing=HashConfig(dense_rows=0), inplace=inplace)
    assert converted(raw_batch()).shape == (1, 4)
    if not inplace:
        with pytest.raises((IndexError, RuntimeError)):
            model(raw_batch())


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


ROWS, DIM = 40, 4
RAW = recfx.HashConfig(dense_rows=0, buckets=1)


class Tied(nn.Module):
    """``goods`` and ``history`` are one weight; the pooled one, or the other one, is looked up first."""

    def __init__(self, pooled_first: bool = True, **of_history: Any) -> None:
        super().__init__()
        self.pooled_first = pooled_first
        self.ebc = EmbeddingBagCollection(
            [table("goods", ["item"], rows=ROWS, dim=DIM), table("users", ["user"], rows=ROWS, dim=DIM)]
        )
        self.ec = EmbeddingCollection([sequence_table("history", ["seen"], rows=ROWS, dim=DIM, **of_history)])
        self.ec.embeddings["history"].weight = self.ebc.embedding_bags["goods"].weight

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        if self.pooled_first:
            pooled, rows = self.ebc(features).values(), self.ec(features)["seen"].values()
        else:
            rows, pooled = self.ec(features)["seen"].values(), self.ebc(features).values()
        scale = torch.ones_like(rows).flatten().cumsum(0).view_as(rows) / 8 - 1
        return pooled.square().sum() + (rows * scale).sum() + (pooled[:, :DIM].sum() * rows.sum())


def built(optimizer: str | None = "adagrad", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Tied(**options)
    if optimizer is not None:
        attach(model, optimizer)
    return model


def tied(optimizer: str | None = "adagrad", hashing: Any = RAW, **options: Any) -> Any:
    return recfx.convert(built(optimizer, **options), hashing=hashing)


def test_rows_that_an_output_layer_reads_are_pointed_out() -> None:
    model = built(None)
    del model.ec
    model.head = nn.Linear(DIM, ROWS, bias=False)
    model.head.weight = model.ebc.embedding_bags["users"].weight
    (note,) = [
        reason
        for reason in recfx.explain(recfx.convert(model, hashing=RAW)).reasons
        if reason.code == "rows_read_elsewhere"
    ]
    assert note.message.startswith("head.weight is the weight of ebc.embedding_bags.users")
    adopted = recfx.explain(recfx.convert(model)).reasons
    assert "rows_read_elsewhere" not in {reason.code for reason in adopted}


@pytest.mark.parametrize("hashing", [RAW, {"goods": RAW, "users": RAW, "history": None}], ids=["both", "one"])
def test_tables_of_one_weight_have_no_index(hashing: Any) -> None:
    with refused("tied_tables", "ec"):
        tied(hashing=hashing)
    plain = recfx.unconvert(tied(hashing=None))
    assert plain.ebc.embedding_bags["goods"].weight is plain.ec.embeddings["history"].weight


@pytest.mark.parametrize("collection", ["ec", "ebc"])
def test_shards_do_not_share_a_weight(collection: str) -> None:
    nothing: Any = None
    with refused("tied_tables", collection):
        shard_collection(tied(hashing=None).get_submodule(collection), {}, nothing)
