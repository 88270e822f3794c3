"""Ranks that would shard one collection with different settings: all of them are refused, and told what differs."""

import re
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.sharding import settings as settings_of_ranks
from recfx.collections.sharding.collection import sharded_collections
from tests.builders.optimizers import attach
from tests.sharding.pipelined import CPU
from tests.sharding.ranks import on_ranks
from tests.support.refusals import refused


@dataclass(frozen=True)
class Settings:
    """How one rank makes and shards the model; ``optimizer`` is in backward, and its settings follow its name."""

    hashing: recfx.HashConfig | None = None
    names: str = "abc"
    dtype: DataType = DataType.FP32
    optimizer: tuple[str, dict[str, Any]] | None = ("sgd", {})
    frozen: tuple[str, ...] = ()
    dedup: Any = "auto"
    fused_params: dict[str, Any] | None = None
    precision: CommType = CommType.FP32
    version: str = recfx.__version__


def hashed(**settings: Any) -> Settings:
    return Settings(recfx.HashConfig.raw_ids(buckets=2, **settings), optimizer=None)


def with_adagrad(**settings: Any) -> Settings:
    return Settings(optimizer=("adagrad", settings))


def with_params(rate: float) -> Settings:
    return Settings(optimizer=None, fused_params={"learning_rate": rate})


DIFFERENCES = {
    "policy": (hashed(on_full="evict"), hashed(on_full="evict", evict="lfu"), "HashConfig.evict of table 'b' is"),
    "full": (hashed(), hashed(on_full="share"), "HashConfig.on_full of table 'b' is"),
    "seed": (hashed(seed=5), hashed(seed=7), "HashConfig.seed of table 'b' is 5 on rank 0 and 7 on rank 1."),
    "rows": (hashed(rows=40), hashed(rows=48), "num_embeddings of table 'b' is"),
    "rule": (Settings(), with_adagrad(), "optimizer of table 'a' is"),
    "rate": (with_adagrad(), with_adagrad(lr=0.2), "optimizer.lr of table 'a' is"),
    "start": (with_adagrad(), with_adagrad(initial_accumulator_value=0.5), "optimizer: first momentum1 of table 'a'"),
    "sharder": (with_params(0.5), with_params(0.25), "fused_params.learning_rate is"),
    "frozen": (Settings(), Settings(frozen=("b",)), "requires_grad of table 'b' is"),
    "dtype": (Settings(), Settings(dtype=DataType.FP16), "dtype of table 'a' is"),
    "dedup": (Settings(), Settings(dedup=False), "dedup.asked of table 'a' is"),
    "tables": (Settings(), Settings(names="ab"), "tables is"),
    "version": (Settings(), Settings(version="9"), "version of recfx is"),
    "wire": (
        Settings(precision=CommType.FP16),
        Settings(precision=CommType.BF16),
        "qcomm_codecs_registry['POOLED_EMBEDDINGS_ALL_TO_ALL'] is",
    ),
}


class Model(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=32, embedding_dim=8, feature_names=[name], data_type=settings.dtype
            )
            for name in settings.names
        ]
        self.ebc = EmbeddingBagCollection(tables)
        if settings.optimizer is not None:
            kind, of_optimizer = settings.optimizer
            attach(self, kind, **of_optimizer)
        for name in settings.frozen:
            self.ebc.embedding_bags[name].weight.requires_grad_(False)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(features).values()


def sharded(settings: Settings, entry: str) -> Any:
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    options: dict[str, Any] = {
        "hashing": {"b": settings.hashing} if settings.hashing else None,
        "dedup": settings.dedup,
    }
    with mock.patch.object(settings_of_ranks, "__version__", settings.version):
        if entry == "convert":
            return recfx.convert(Model(settings), env=env, **options)
        config = QCommsConfig(settings.precision, settings.precision)
        codecs = get_qcomm_codecs_registry(config, device=torch.device("cuda"))
        sharders = recfx.sharders(fused_params=settings.fused_params, qcomm_codecs_registry=codecs)
        return DistributedModelParallel(recfx.convert(Model(settings), **options), env, CPU, sharders=sharders)


def batch(rank: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(list("abc"), torch.arange(3) + 5 * rank, lengths=torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "entry"),
    [(name, ("convert", "DistributedModelParallel")[number % 2]) for number, name in enumerate(DIFFERENCES)],
)
@on_ranks(2)
def test_ranks_with_different_settings_are_all_told_what_differs(
    rank: int, world_size: int, name: str, entry: str
) -> None:
    """And compute together with equal settings afterwards."""
    with refused("ranks_have_different_settings", match=re.escape(DIFFERENCES[name][2])) as caught:
        sharded(DIFFERENCES[name][rank], entry)
    assert caught.value.module_path.rpartition(".")[2] == "ebc"
    assert ("broadcast_object_list" in str(caught.value)) == (name == "seed")
    torch.testing.assert_close(sharded(Settings(), entry)(batch(rank)), Model(Settings())(batch(rank)))


@on_ranks(2)
def test_what_no_other_rank_depends_on_may_differ(rank: int, world_size: int) -> None:
    """One rank's optimizer names an implementation, and it has asked for properties that are computed once."""
    model = recfx.convert(Model(with_adagrad(**({"foreach": True} if rank else {}))))
    if rank:
        assert not any(table.sends_different for table in model.ebc.tables)
    assert len(sharded_collections(recfx.convert(model, env=ShardingEnv.from_process_group(dist.group.WORLD)))) == 1
