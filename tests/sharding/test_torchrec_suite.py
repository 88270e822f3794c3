"""TorchRec's own sharding test, run on converted models: meta tables, planner, one step, predictions compared.

Its package has the model with pooled tables; the one with sequence tables is ours, called as TorchRec calls its own.

Its ``DistributedModelParallel`` is replaced by the conversion before it, and by our sharders; all else is TorchRec's.
"""

from __future__ import annotations

import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, PoolingType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.test_utils.test_model import ModelInput, TestSparseNN, TestSparseNNBase
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.sharding.collection import (
    ShardedCollection,
    ShardedHashEmbeddingBagCollection,
    ShardedHashEmbeddingCollection,
)
from tests.sharding.ranks import ranks
from tests.support.needs import needs

# test_sharding imports two names from a package that the wheel does not have; nothing here uses them.
_absent = types.ModuleType("torchrec.distributed.tests.test_sequence_model")
_absent.TestEmbeddingCollectionSharder = _absent.TestSequenceSparseNN = object  # type: ignore[attr-defined]
with mock.patch.dict(sys.modules, {"torchrec.distributed.tests": types.ModuleType("tests"), _absent.__name__: _absent}):
    from torchrec.distributed.test_utils import test_sharding

pytestmark = needs(
    hasattr(test_sharding, "sharding_single_rank_test_single_process"), "TorchRec 1.4, whose own test takes a group"
)

# Their names begin as those of test classes do.
TestSparseNN.__test__ = TestSparseNNBase.__test__ = False  # type: ignore[attr-defined]


def tables(pooling: PoolingType, dim: int, prefix: str) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            num_embeddings=(i + 1) * 10,
            embedding_dim=dim,
            name=f"{prefix}table_{i}",
            feature_names=[f"{prefix}feature_{i}"],
            pooling=pooling,
        )
        for i in range(3)
    ]


class Sequences(TestSparseNNBase):
    """Scores of padded rows, with the ids in the output of the collection."""

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        num_float_features: int,
        dense_device: torch.device | None = None,
        sparse_device: torch.device | None = None,
        **_: Any,
    ) -> None:
        super().__init__(tables, dense_device=dense_device, sparse_device=sparse_device)
        self.ec = EmbeddingCollection(tables=tables, device=sparse_device, need_indices=True)
        self.names = [name for of_table in self.ec.embedding_names_by_table() for name in of_table]
        width = num_float_features + len(self.names) * _LONGEST * tables[0].embedding_dim
        self.over = nn.Linear(width, 1, device=dense_device)

    def forward(self, features: ModelInput) -> Any:
        rows = self.ec(features.idlist_features)
        padded = [rows[name].to_padded_dense(_LONGEST).flatten(1) for name in self.names]
        inverse = features.idlist_features.inverse_indices_or_none()
        if isinstance(self.ec, EmbeddingCollection) and inverse is not None:  # sharded, it expands variable batches
            padded = [
                part[inverse[1][inverse[0].index(name.partition("@")[0])]]
                for name, part in zip(self.names, padded, strict=True)
            ]
        ids = sum(rows[name].weights().sum() for name in self.names)
        scores = self.over(torch.cat([features.float_features, *(10 * part for part in padded)], dim=1)).squeeze(1)
        predictions = scores.sigmoid() + 0 * ids
        if not self.training:
            return predictions
        return nn.functional.binary_cross_entropy_with_logits(predictions, features.label), predictions


_LONGEST = 20


def sequence_tables(dim: int) -> list[EmbeddingConfig]:
    """Five tables; two of three features are read by two of them."""
    return [
        EmbeddingConfig(
            num_embeddings=(feature + 1) * 11,
            embedding_dim=dim,
            name=f"table_{i}",
            feature_names=[f"feature_{feature}"],
        )
        for i, feature in enumerate([0, 1, 2, 0, 1])
    ]


def run_torchrec_test(
    rank: int, world_size: int, model_class: Any, kind: str, sharding_type: str, arguments: dict[str, Any]
) -> int:
    """Run it; how many collections were converted and sharded."""
    converted: list[nn.Module] = []

    def convert_first(model: nn.Module, env: ShardingEnv, plan: Any, sharders: Any, device: torch.device) -> nn.Module:
        fused_params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
        ours = recfx.sharders(fused_params=fused_params)
        wrapped = DistributedModelParallel(
            recfx.convert(model, hashing=None), env=env, plan=plan, sharders=ours, device=device
        )
        converted.extend(m for m in wrapped.modules() if isinstance(m, ShardedCollection))
        return wrapped

    torch.manual_seed(0)
    sharder = test_sharding.create_test_sharder(
        kind, sharding_type, "dense" if sharding_type == "data_parallel" else "fused"
    )
    configs = [*arguments["tables"], *arguments.get("weighted_tables", ())]
    with mock.patch.object(test_sharding, "DistributedModelParallel", convert_first):
        test_sharding.sharding_single_rank_test_single_process(
            pg=dist.group.WORLD,
            device=torch.device("cpu"),
            rank=rank,
            world_size=world_size,
            model_class=model_class,
            embedding_groups={"group_0": [f"feature_{i}" for i in range(3)]},
            sharders=[sharder],
            optim=EmbOptimType.EXACT_SGD,
            local_size=2,
            constraints={
                config.name: ParameterConstraints(
                    sharding_types=[sharding_type], min_partition=config.embedding_dim // 2
                )
                for config in configs
            },
            random_seed=5,
            **arguments,
        )
    standard = ShardedHashEmbeddingCollection if model_class is Sequences else ShardedHashEmbeddingBagCollection
    assert all(isinstance(module, standard) for module in converted)
    return len(converted)


SUM, MEAN = PoolingType.SUM, PoolingType.MEAN


@pytest.mark.parametrize(
    ("sharding_type", "world_size", "pooling"),
    [
        ("table_wise", 2, MEAN),
        ("row_wise", 2, MEAN),
        ("column_wise", 2, SUM),
        ("data_parallel", 2, MEAN),
        ("table_column_wise", 2, MEAN),
        ("table_row_wise", 4, SUM),
        ("grid_shard", 4, MEAN),
    ],
)
def test_torchrec_own_test_passes(sharding_type: str, world_size: int, pooling: PoolingType) -> None:
    arguments = {"tables": tables(pooling, 16, ""), "weighted_tables": tables(PoolingType.SUM, 16, "weighted_")}
    counts = ranks(world_size).run(
        run_torchrec_test, TestSparseNN, "embedding_bag_collection", sharding_type, arguments
    )
    assert counts == [2] * world_size  # the plain and the weighted collection


IN_BACKWARD = {"apply_optimizer_in_backward_config": {"embeddings": (torch.optim.SGD, {"lr": 0.1})}}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("sharding_type", "arguments"),
    [
        ("table_wise", {}),
        ("table_wise", IN_BACKWARD),
        ("table_wise", {"variable_batch_per_feature": True}),
        ("table_wise", {"tables": sequence_tables(16)[:1]}),  # all other ranks have no table
        ("row_wise", {}),
        ("row_wise", IN_BACKWARD),
        ("row_wise", {"variable_batch_per_feature": True}),
        ("column_wise", {}),
        ("column_wise", IN_BACKWARD),
        ("column_wise", {"variable_batch_per_feature": True}),
        ("data_parallel", {}),
    ],
)
def test_torchrec_own_test_passes_with_sequences(sharding_type: str, world_size: int, arguments: Any) -> None:
    arguments = {"tables": sequence_tables(16), **arguments}
    counts = ranks(world_size).run(run_torchrec_test, Sequences, "embedding_collection", sharding_type, arguments)
    assert counts == [1] * world_size
