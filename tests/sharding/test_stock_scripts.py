"""Training scripts as their authors publish them train the same with ``recfx.convert`` where the model is made.

What they leave to chance is fixed, so that two runs can be compared: weights after sharding, and the random batches.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import recfx
from recfx.collections.sharding.collection import sharded_collections
from recfx.ir import format_graph
from tests.sharding.ranks import ranks

CPU, META = torch.device("cpu"), torch.device("meta")
ROWS, DIM, BATCH, STEPS = 120, 8, 16, 4
FEATURES = [f"cat_{number}" for number in range(5)]

Line = Callable[[nn.Module], nn.Module]  # the line that is inserted where the model is made
Result = tuple[list[torch.Tensor], dict[str, torch.Tensor]]  # of every step; weights on this rank


def tables(features: list[str]) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
        for name in features
    ]


def dlrm() -> DLRM:
    return DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables(FEATURES), device=META),
        dense_in_features=3,
        dense_arch_layer_sizes=[16, DIM],
        over_arch_layer_sizes=[16, 1],
        dense_device=CPU,
    )


def golden_training(rank: int, line: Line, *, quantized: bool = False) -> Result:
    """Meta tables, row-wise Adagrad in backward, a list of one sharder, a pipeline.

    ``quantized``: as with nccl, on whose devices the planner would not make such tables data-parallel either.
    """
    train_model = line(DLRMTrain(dlrm()))
    _apply_optimizer_in_backward(RowWiseAdagrad, train_model.model.sparse_arch.parameters(), {"lr": 0.1})
    config = QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    sharder = EmbeddingBagCollectionSharder(
        qcomm_codecs_registry=get_qcomm_codecs_registry(config, device=torch.device("cuda")) if quantized else None
    )
    plan = None
    if quantized:
        whole = {table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables(FEATURES)}
        topology = Topology(world_size=dist.get_world_size(), compute_device=CPU.type)
        planner = EmbeddingShardingPlanner(topology=topology, constraints=whole)
        plan = planner.collective_plan(train_model, [sharder], dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=train_model, device=CPU, plan=plan, sharders=[sharder])
    non_fused_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.Adagrad(params, lr=0.1)
    )
    set_weights(model)
    train_pipeline = TrainPipelineSparseDist(model, non_fused_optimizer, CPU)
    batches = data(rank, FEATURES)
    losses = [train_pipeline.progress(batches)[0] for _ in range(STEPS)]
    return losses, local_weights(model)


def public_dlrm(rank: int, line: Line, adagrad: bool) -> Result:
    """A plan made ahead with the default sharders, one optimizer for everything, a schedule, and evaluations."""
    train_model = line(DLRMTrain(dlrm()))
    kind = torch.optim.Adagrad if adagrad else torch.optim.SGD
    settings = {"lr": 0.1, "eps": 1e-6} if adagrad else {"lr": 0.1}
    apply_optimizer_in_backward(
        kind, train_model.model.sparse_arch.parameters(), dict(settings)
    )  # TorchRec writes into it
    planner = EmbeddingShardingPlanner(
        topology=Topology(local_world_size=get_local_size(), world_size=dist.get_world_size(), compute_device=CPU.type),
        batch_size=BATCH,
        storage_reservation=HeuristicalStorageReservation(percentage=0.05),
    )
    plan = planner.collective_plan(train_model, get_default_sharders(), dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=train_model, device=CPU, plan=plan)
    dense_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: kind(params, **settings)
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer])
    set_weights(model)
    train_pipeline = TrainPipelineSparseDist(model, optimizer, CPU, execute_all_batches=True)
    losses = []
    for epoch in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + epoch)
        model.train()
        losses += run_all(train_pipeline, data(rank, FEATURES, seed=epoch, batches=STEPS))
        model.eval()
        with torch.no_grad():
            losses += run_all(TrainPipelineSparseDist(model, optimizer, CPU), data(rank, FEATURES, seed=9, batches=2))
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    return losses, local_weights(model)


def run_all(pipeline: Any, batches: Iterator[Batch]) -> list[torch.Tensor]:
    losses = []
    while True:
        try:
            losses.append(pipeline.progress(batches)[0])
        except StopIteration:
            return losses


def data(rank: int, features: list[str], seed: int = 0, batches: int = STEPS + 3) -> Iterator[Batch]:
    return iter(
        RandomRecDataset(
            keys=features,
            batch_size=BATCH,
            hash_size=ROWS,
            ids_per_feature=2,
            num_dense=3,
            num_batches=batches,
            manual_seed=100 * seed + rank,
        )
    )


def set_weights(model: nn.Module) -> None:
    """Give the model weights that are the same on all ranks and in both runs."""
    with torch.no_grad():
        for value in model.state_dict().values():
            whole = (torch.arange(value.size().numel(), dtype=torch.float32).sin() * 0.1).view(value.size())
            if not hasattr(value, "local_shards"):
                value.copy_(whole)
                continue
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(whole[row : row + rows, column : column + columns])


def local_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    weights = {}
    for name, value in model.state_dict().items():
        if not hasattr(value, "local_shards"):
            weights[name] = value.detach().clone()
            continue
        for number, shard in enumerate(value.local_shards()):
            weights[f"{name}@{number}"] = shard.tensor.detach().clone()
    return weights


SCRIPTS: dict[str, Callable[..., Result]] = {
    "golden training": golden_training,
    "golden training, quantized": functools.partial(golden_training, quantized=True),
    "public DLRM, Adagrad": functools.partial(public_dlrm, adagrad=True),
    "public DLRM, SGD": functools.partial(public_dlrm, adagrad=False),
}


def both(rank: int, world_size: int, name: str) -> list[Any]:
    """The script as it is, and with the line."""
    converted = []

    def line(model: torch.nn.Module) -> torch.nn.Module:
        converted.append(recfx.convert(model))
        return converted[0]

    answers = [SCRIPTS[name](rank, lambda model: model), SCRIPTS[name](rank, line)]
    graphs = [format_graph(sharded.graph_module) for sharded in sharded_collections(converted[0]).values()]
    assert graphs, "the converted collection stayed unsharded"
    assert all(("wire=fp16, wire_backward=bf16" in graph) == ("quantized" in name) for graph in graphs)
    return answers


@pytest.mark.parametrize(("name", "world_size"), [*((name, 2) for name in SCRIPTS), ("golden training", 1)])
def test_one_line_changes_nothing(name: str, world_size: int) -> None:
    for stock, ours in ranks(world_size).run(both, name):
        torch.testing.assert_close(ours[0], stock[0], rtol=1e-5, atol=1e-6)
        assert ours[1].keys() == stock[1].keys()
        # After STEPS steps. FBGEMM sums a row's gradients in another order, and Adagrad divides by the sum's size.
        torch.testing.assert_close(ours[1], stock[1], rtol=1e-4, atol=1e-5)
