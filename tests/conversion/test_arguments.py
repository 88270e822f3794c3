"""Arguments of a wrong type or size: one typed error that names the argument, wherever they are passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx import HashConfig, HashEmbeddingBagCollection, HashEmbeddingBagConfig, HashIndex
from recfx.errors import type_of
from tests.builders.batches import batch
from tests.builders.collections import collection, table
from tests.support.refusals import refused

RAW = HashConfig(dense_rows=0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("model", [None, 3, "model", [Model()], Model], ids=str)
def test_what_is_no_module(model: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: recfx.explain(model),
        lambda: recfx.convert(model),
        lambda: recfx.unconvert(model),
        lambda: recfx.trace(model, (batch(2),)),
        lambda: recfx.verify(model, Model(), (batch(2),)),
        lambda: recfx.verify(Model(), model, (batch(2),)),
        lambda: recfx.TrainPipeline(model, trained()[1], "cpu"),
    ]
    for call in calls:
        with refused("invalid_argument", match=type_of(model)):
            call()


@pytest.mark.parametrize(
    "hashing", [{1: RAW, "t1": RAW}, {"t1": RAW, 1: RAW}, {None: RAW}, {("t1",): None, "t1": RAW}], ids=str
)
def test_keys_of_hashing_that_are_no_names(hashing: Any) -> None:
    with refused("invalid_argument", match="which is not a string"):
        recfx.convert(Model(), hashing=hashing)


@pytest.mark.parametrize(
    "settings",
    [{"num_embeddings": 0}, {"num_embeddings": -1}, {"num_embeddings": 1.5}, {"num_embeddings": True},
     {"embedding_dim": 0}, {"embedding_dim": "8"}, {"hashing": "raw"}, {"hashing": {}}, {"hashing": None}],
    ids=str,
)  # fmt: skip
def test_configs_of_tables(settings: dict[str, Any]) -> None:
    rows = numpy.int64(10)
    right: dict[str, Any] = {"name": "t", "num_embeddings": rows, "embedding_dim": 4, "feature_names": ["f"]}
    (field,) = settings
    with refused("invalid_table_config", "t", match=field):
        HashEmbeddingBagConfig(**right | settings)
    config = HashEmbeddingBagConfig(**right)
    assert HashEmbeddingBagCollection([config]).weight("t").shape == (10, 4)
    setattr(config, field, settings[field])  # after it was made
    with pytest.raises(recfx.ConversionError, match=field):
        HashEmbeddingBagCollection([config])


def test_tables_that_are_no_configs() -> None:
    for tables in (["t"], [None], [HashConfig()]):
        with refused("invalid_table_config", match="described by"):
            HashEmbeddingBagCollection(tables)
    assert HashEmbeddingBagCollection([table("t", ["f"])]).index("t").config.dense_rows == 0


@pytest.mark.parametrize("settings", [{"config": 3}, {"config": None}, {"name": 3}], ids=str)
def test_arguments_of_an_index(settings: dict[str, Any]) -> None:
    with refused("invalid_argument"):
        HashIndex(3, **settings)


@pytest.mark.parametrize("rows", [0, -1, "10", 1.5, True, 2**60, None])
def test_rows_of_an_index(rows: Any) -> None:
    with refused("invalid_hash_config", match="rows is"):
        HashIndex(rows)


@pytest.mark.parametrize(
    ("device", "reason"),
    [(None, "invalid_argument"), (1.5, "invalid_argument"), ("nowhere", "device_unavailable")],
    ids=str,
)
def test_devices_of_a_pipeline(device: Any, reason: str) -> None:
    with refused(reason, match="device"):
        recfx.TrainPipeline(*trained(), device)


@pytest.mark.parametrize(
    ("world_size", "rank", "named"), [(2, 9, "rank"), (2, -1, "rank"), (2, None, "rank"), (0, 0, "world_size")]
)
def test_environments_without_their_rank(world_size: Any, rank: Any, named: str) -> None:
    env = ShardingEnv.from_local(world_size, rank)
    for call in (recfx.explain, recfx.convert):
        with refused("invalid_argument", match=f"env.{named} is", error=recfx.InputError):
            call(Model(), env=env)
