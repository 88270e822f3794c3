"""Converted collections in TorchRec's own planner and DistributedModelParallel."""

import pytest
import torch
from torch import nn
from torchrec.distributed import embedding_types
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

import recfx
from recfx.collections.sharding.types import SHARDING_TYPES
from recfx.planner.sharder import HashEmbeddingBagCollectionSharder, stock_defaults
from tests.sharding.models import collection
from tests.support.refusals import refused

RAW = recfx.HashConfig(dense_rows=0)


def tables_of(plan: ShardingPlan) -> dict[str, list[str]]:
    return {path: sorted(module_plan) for path, module_plan in plan.plan.items()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sharding_type", SHARDING_TYPES)
def test_every_sharding_type(sharding_type: str, device: str) -> None:
    model = recfx.convert(collection("t", dim=256), hashing=RAW)
    constraints = {
        f"t{number}": ParameterConstraints(sharding_types=[sharding_type], min_partition=64) for number in range(3)
    }
    topology = Topology(world_size=4, local_world_size=2, compute_device=device)
    plan = EmbeddingShardingPlanner(topology=topology, constraints=constraints).plan(model, recfx.sharders())
    for parameter in plan.plan[""].values():
        assert parameter.sharding_type == sharding_type
        assert parameter.compute_kernel == ("dense" if sharding_type == "data_parallel" else "fused")
        shards = 0 if parameter.sharding_spec is None else len(parameter.sharding_spec.shards)
        assert shards == {
            "data_parallel": 0,
            "table_wise": 1,
            "column_wise": 4,
            "table_column_wise": 4,
            "row_wise": 4,
            "table_row_wise": 2,
            "grid_shard": 8,
        }.get(sharding_type)


def test_what_the_sharder_offers() -> None:
    sharder = HashEmbeddingBagCollectionSharder()
    for device in ("cpu", "cuda", "npu", "meta"):
        assert sharder.sharding_types(device) == list(SHARDING_TYPES)
        if device in ("cpu", "cuda") or hasattr(embedding_types, "compute_storage_usage"):  # TorchRec 1.4 knows no more
            kind = "ddr" if device == "cpu" else "hbm"
            assert sharder.storage_usage(torch.zeros(4, 2), device, "fused") == {kind: 32}
    assert sharder.sharding_types("mtia") == []
    converted = recfx.convert(collection("t", device="cpu"), hashing=RAW)
    parameters = sharder.shardable_parameters(converted)
    assert list(parameters) == ["t0", "t1", "t2"]
    assert all(parameter is converted.weight(name) for name, parameter in parameters.items())
    per_table = {name: row_wise() for name in parameters}
    plan = construct_module_sharding_plan(converted, per_table, sharder, local_size=2, world_size=2, device_type="cpu")
    assert {parameter.sharding_type for parameter in plan.values()} == {"row_wise"}


def test_others_are_torchrecs() -> None:
    listed = recfx.sharders()
    assert listed[0].module_type is recfx.HashEmbeddingBagCollection
    theirs = [sharder.module_type for sharder in stock_defaults()]
    assert [sharder.module_type for sharder in listed[-len(theirs) :]] == theirs
    params = {"learning_rate": 0.5}
    with_params = recfx.sharders(fused_params=params)
    for kind in (HashEmbeddingBagCollectionSharder, EmbeddingBagCollectionSharder, EmbeddingCollectionSharder):
        (sharder, *_) = [sharder for sharder in with_params if type(sharder) is kind]
        assert sharder.fused_params == params
        assert sharder.fused_params is not params
    assert recfx.sharders(fused_params={})[0].fused_params is None


def test_shard_refuses_what_is_not_converted() -> None:
    sharder = HashEmbeddingBagCollectionSharder()
    env = ShardingEnv.from_local(world_size=1, rank=0)
    with refused("not_converted", "part.ebc"):
        sharder.shard(collection("t"), {}, env, torch.device("cpu"), "part.ebc")
    with refused("host_env_without_group"):
        recfx.sharders(host_env=env)


def test_an_index_inside_a_feature_processed_collection_is_not_dropped() -> None:
    processors = PositionWeightedModuleCollection(max_feature_lengths={"f0": 4, "f1": 4, "f2": 4, "shared": 4})
    plain = FeatureProcessedEmbeddingBagCollection(collection("t", weighted=True), processors)
    model = recfx.convert(nn.ModuleDict({"fp": plain}), hashing=RAW)
    inner = {"fp._embedding_bag_collection": ["t0", "t1", "t2"]}
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=4, compute_device="cpu"))
    assert tables_of(planner.plan(model, recfx.sharders())) == inner
    half = nn.ModuleDict({"converted": model, "standard": plain})
    with refused("feature_processed"):
        planner.plan(half, stock_defaults())
    for planned in (model, nn.ModuleDict({"fp": plain})):
        plan = recfx.plan(planned, Topology(world_size=2, compute_device="cpu"))
        assert tables_of(plan) == inner
