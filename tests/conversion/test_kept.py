"""Collections that stay as they are beside converted ones: which ids reach them, and whose state they have."""

from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

import recfx
from recfx.collections.hash_collections import HashEmbeddingBagCollection
from tests.builders.batches import batch
from tests.builders.collections import collection, sharded_sequences, table
from tests.models.handwritten import process_group
from tests.support.refusals import refused

RAW = recfx.HashConfig(dense_rows=0)


def managed(configs: list[Any]) -> ManagedCollisionCollection:
    modules = {
        config.name: MCHManagedCollisionModule(
            zch_size=config.num_embeddings,
            device=torch.device("cpu"),
            eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
        )
        for config in configs
    }
    return ManagedCollisionCollection(managed_collision_modules=modules, embedding_configs=configs)


def managed_bags() -> nn.Module:
    configs = [table("m", ["f1"])]
    return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables=configs), managed(configs))


def managed_sequence() -> nn.Module:
    configs = [EmbeddingConfig(name="m", num_embeddings=20, embedding_dim=8, feature_names=["f1"])]
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(configs), managed(configs))


class Beside(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.ebc, self.other = collection(), other

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features).values().sum(dim=1)
        other = self.other(features)
        output = other[0] if isinstance(other, tuple) else other
        if isinstance(output, dict):
            return pooled + output["f1"].values().sum()
        return pooled + output.values().sum(dim=1)


@pytest.mark.parametrize("hashing", [RAW, recfx.HashConfig(rows=50), recfx.HashConfig(dense_rows=5)])
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_raw_ids_for_the_whole_model_name_the_tables_that_stay(hashing: recfx.HashConfig, inplace: bool) -> None:
    with process_group():
        model = Beside(sharded_sequences())
        weights = model.ebc.embedding_bags["t1"].weight
        with refused("raw_ids_of_kept_tables", "other"):
            recfx.convert(model, (batch(3),), hashing=hashing, inplace=inplace)
    assert model.ebc.embedding_bags["t1"].weight is weights
    assert weights.shape == (20, 8)  # no rows were added


def test_what_asks_for_raw_ids_knowingly_is_no_error() -> None:
    with process_group():
        model = Beside(sharded_sequences())
        for options in ({}, {"hashing": None}, {"hashing": {"t1": RAW}}, {"hashing": RAW, "on_unsupported": "keep"}):
            converted = recfx.convert(model, (batch(3),), verify=False, **options)
            assert isinstance(converted.ebc, HashEmbeddingBagCollection)
            assert isinstance(converted.other, ShardedEmbeddingCollection)
    converted = recfx.convert(Beside(managed_sequence()), hashing=RAW)  # takes raw ids by itself
    assert isinstance(converted.ebc, HashEmbeddingBagCollection)


def test_managed_collisions_of_a_sequence_are_kept_and_listed() -> None:
    with process_group():
        for make, reason in ((managed_sequence, "managed_collision"), (sharded_sequences, "sharded_by_torchrec")):
            report = recfx.explain(recfx.convert(Beside(make()), (batch(3),), verify=False))
            statuses = {entry.paths[0]: (entry.status, entry.reason) for entry in report.collections}
            assert statuses == {"ebc": ("converted", ""), "other": ("kept", reason)}
            assert report.ok
    (kept,) = [entry for entry in recfx.explain(Beside(managed_sequence())).collections if entry.status == "kept"]
    assert kept.reason == "managed_collision"
    assert [(table.name, table.rows) for table in kept.tables] == [("m", 20)]


@pytest.mark.parametrize("make", [managed_bags, managed_sequence])
def test_verify_after_training_with_managed_collisions(make: Any) -> None:
    model = Beside(make())
    converted = recfx.convert(model, (batch(4),), on_unsupported="keep")
    optimizer = torch.optim.SGD(converted.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        converted(batch(4)).sum().backward()
        optimizer.step()
        report = recfx.verify(model, converted, (batch(4),))
        assert report.ok, report
    features = batch(4)
    for _ in range(5):  # the two take turns at one state
        torch.testing.assert_close(model.eval()(features), converted.eval()(features))
        model.train()(features)
        converted.train()(features)
    plain = recfx.unconvert(converted)
    converted.train()(features)
    torch.testing.assert_close(plain.eval()(features), converted.eval()(features))
