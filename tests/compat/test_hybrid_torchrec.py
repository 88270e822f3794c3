"""The names of Rec SDK Torch: what they take, what they refuse, and that they train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel as TorchRecModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

import recfx
from recfx.compat import hybrid_torchrec as hybrid
from recfx.compat.hybrid_torchrec.distributed import hybrid_train_pipeline, sharding_plan
from recfx.compat.hybrid_torchrec.modules import hash_embedding, hash_embeddingbag
from recfx.planner.topology import NpuTopology
from tests.builders.optimizers import attach

CPU = torch.device("cpu")
CONSTRAINTS = {"table": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])}


@dataclass
class Batch(Pipelineable):
    features: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.features.to(device), self.labels.to(device))

    def record_stream(self, stream: torch.Stream) -> None:
        pass

    def pin_memory(self) -> Batch:
        return self


class Model(nn.Module):
    def __init__(self, order: str = "loss first") -> None:
        super().__init__()
        config = hybrid.HashEmbeddingBagConfig(
            name="table", num_embeddings=100, embedding_dim=8, feature_names=["feature"]
        )
        self.ebc = hybrid.HashEmbeddingBagCollection(device="meta", tables=[config])
        self.over = nn.Linear(8, 1)
        self.order = order

    def forward(self, batch: Batch) -> Any:
        result = self.over(self.ebc(batch.features).values()).squeeze(-1)
        loss = (result - batch.labels).square().mean()
        return (loss, result) if self.order == "loss first" else result.mean()


def batches(count: int) -> list[Batch]:
    ids = torch.tensor([-(2**63), 2**63 - 1, 7])
    return [Batch(KeyedJaggedTensor(["feature"], ids, lengths=torch.ones(3).long()), torch.ones(3))] * count


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    logging.disable(logging.NOTSET)


def sharders() -> list[Any]:
    return hybrid.get_default_hybrid_sharders(host_env=ShardingEnv.from_process_group(dist.new_group(backend="gloo")))


def plan_of(model: nn.Module) -> ShardingPlan:
    topology = hybrid.Topology(world_size=1, compute_device="cpu")
    planner = hybrid.EmbeddingShardingPlanner(topology=topology, constraints=CONSTRAINTS)
    return planner.collective_plan(model, sharders(), dist.GroupMember.WORLD)


def parallel(model: nn.Module, **arguments: Any) -> hybrid.DistributedModelParallel:
    given = {"device": CPU, "plan": plan_of(model), "sharders": sharders(), **arguments}
    return hybrid.DistributedModelParallel(model, **given)


def trainable() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    attach(model.ebc, torch.optim.Adagrad, eps=1e-8)
    wrapped = parallel(model)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(wrapped.named_parameters())), lambda params: torch.optim.SGD(params, lr=0.1)
    )
    assert sorted(dense.params) == ["over.bias", "over.weight"]
    return wrapped, CombinedOptimizer([wrapped.fused_optimizer, dense])


def refused(reason: str, call: Callable[[], object]) -> str:
    with pytest.raises(recfx.ConversionError) as caught:
        call()
    assert caught.value.reason == reason
    assert caught.value.what_to_do
    return str(caught.value)


def test_names_are_where_theirs_are() -> None:
    assert hash_embeddingbag.HashEmbeddingBagConfig is recfx.HashEmbeddingBagConfig
    assert hash_embeddingbag.HashEmbeddingBagCollection is recfx.HashEmbeddingBagCollection
    assert hash_embedding.HashEmbeddingConfig is hybrid.HashEmbeddingConfig is recfx.HashEmbeddingConfig
    assert hash_embedding.HashEmbeddingCollection is hybrid.HashEmbeddingCollection is recfx.HashEmbeddingCollection
    assert sharding_plan.get_default_hybrid_sharders is hybrid.get_default_hybrid_sharders
    assert hybrid_train_pipeline.HybridTrainPipelineSparseDist is hybrid.HybridTrainPipelineSparseDist
    assert hybrid.DistributedModelParallel is TorchRecModelParallel


@pytest.mark.parametrize("return_loss", [False, True])
def test_the_pipeline_trains_every_batch(return_loss: bool) -> None:
    model, optimizer = trainable()
    pipeline = hybrid.HybridTrainPipelineSparseDist(model, optimizer, CPU, return_loss=return_loss)
    losses = []
    for _ in range(2):  # epochs
        iterator = iter(batches(4))
        for _ in range(4):
            answer = pipeline.progress(iterator)
            output, loss = answer if return_loss else (answer, (answer - 1).square().mean())
            assert output.shape == (3,)
            losses.append(float(loss.detach()))
        with pytest.raises(StopIteration):
            pipeline.progress(iterator)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
    assert len(model.module.ebc.hash_indexes["table"]) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        {"apply_jit": True},
        {"execute_all_batches": False},
        {"pipe_n_batch": 0},
        {"pipe_n_batch": 13},
        {"pipe_n_batch": 2.0},
        {"pipe_n_batch": True},
    ],
    ids=", ".join,
)
def test_the_pipeline_refuses(arguments: dict[str, Any]) -> None:
    model, optimizer = trainable()
    given = {"model": model, "optimizer": optimizer, "device": CPU, **arguments}
    message = refused("pipeline_argument", lambda: hybrid.HybridTrainPipelineSparseDist(**given))
    assert next(iter(arguments)) in message


def test_forward_has_to_return_the_loss_first() -> None:
    model = parallel(Model("no loss"))
    optimizer = torch.optim.SGD(model.module.over.parameters(), lr=0.1)
    pipeline = hybrid.HybridTrainPipelineSparseDist(model, optimizer, CPU)
    refused("no_loss_and_output", lambda: pipeline.progress(iter(batches(1))))


def test_host_env() -> None:
    refused("host_env_missing", lambda: hybrid.get_default_hybrid_sharders(None))  # type: ignore[arg-type]
    refused("host_env_without_group", lambda: hybrid.get_default_hybrid_sharders(ShardingEnv(1, 0)))


def test_host_env_over_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: "hccl")
    refused("host_env_not_gloo", sharders)


def test_npu_pods_are_planned_for() -> None:
    topology = hybrid.Topology(world_size=8, compute_device="npu")
    assert isinstance(topology, NpuTopology)
    planner = hybrid.EmbeddingShardingPlanner(topology=topology, constraints=CONSTRAINTS)
    plan = planner.collective_plan(Model(), sharders(), dist.GroupMember.WORLD)
    sharding = plan.plan["ebc"]["table"]
    assert (sharding.sharding_type, sharding.ranks) == ("row_wise", list(range(8)))
    placements = [str(shard.placement) for shard in sharding.sharding_spec.shards]
    # Without torch_npu the device has torch's own name for it.
    assert [place.replace("privateuseone", "npu") for place in placements[::7]] == ["rank:0/npu:0", "rank:7/npu:7"]


def test_npu_pods_keep_defaults() -> None:
    refused("npu_argument", lambda: hybrid.Topology(8, "npu", hbm_cap=1))
    topology = hybrid.Topology(8, "npu")
    refused("npu_argument", lambda: hybrid.EmbeddingShardingPlanner(topology, enumerator=object()))
