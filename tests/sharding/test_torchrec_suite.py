"""TorchRec's own sharding test, run on converted models: meta tables, planner, one step, predictions compared.

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
from torchrec import EmbeddingBagConfig, PoolingType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.test_utils.test_model import TestSparseNN, TestSparseNNBase
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.sharding.collection import (
    ShardedCollection,
    ShardedHashEmbeddingBagCollection,
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


def run_torchrec_test(rank: int, world_size: int, sharding_type: str, pooling: PoolingType) -> int:
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
    kernel = "dense" if sharding_type == "data_parallel" else "fused"
    sharder = test_sharding.create_test_sharder("embedding_bag_collection", sharding_type, kernel)
    configs, weighted = tables(pooling, 16, ""), tables(PoolingType.SUM, 16, "weighted_")
    with mock.patch.object(test_sharding, "DistributedModelParallel", convert_first):
        test_sharding.sharding_single_rank_test_single_process(
            pg=dist.group.WORLD,
            device=torch.device("cpu"),
            rank=rank,
            world_size=world_size,
            model_class=TestSparseNN,
            embedding_groups={"group_0": [f"feature_{i}" for i in range(3)]},
            sharders=[sharder],
            optim=EmbOptimType.EXACT_SGD,
            local_size=2,
            constraints={
                config.name: ParameterConstraints(
                    sharding_types=[sharding_type], min_partition=config.embedding_dim // 2
                )
                for config in (*configs, *weighted)
            },
            random_seed=5,
            tables=configs,
            weighted_tables=weighted,
        )
    assert all(isinstance(module, ShardedHashEmbeddingBagCollection) for module in converted)
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
    counts = ranks(world_size).run(run_torchrec_test, sharding_type, pooling)
    assert counts == [2] * world_size  # the plain and the weighted collection
