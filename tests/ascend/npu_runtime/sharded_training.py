"""Training of ``tests.sharding.cases`` with a shard on each NPU, in a group of processes called ``hccl``."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import recfx
from recfx.collections.collection import UnshardedCollection
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.shard import shard_collection
from recfx.planner.topology import on_npus
from tests.sharding.cases import OPTIMIZERS, Case, Model, batches, build, plan_of, taken, with_optimizer

_host_groups: list[dist.ProcessGroup] = []


def host_group() -> dist.ProcessGroup:
    """A group of gloo's over all ranks, made once in each process."""
    if not _host_groups:
        _host_groups.append(dist.new_group(backend="gloo"))
    return _host_groups[0]


def model_on_npus(case: Case, world_size: int, device: torch.device, ids_on_host: bool) -> Model:
    """The case's model, its tables sharded over all NPUs."""
    standard, width = build(case)
    torch.manual_seed(1)
    model = Model(standard, width)
    converted = with_optimizer(case, recfx.convert(standard, hashing=case.hashing, dedup=case.dedup))
    assert isinstance(converted, UnshardedCollection)
    plan: Any = plan_of(case, converted, world_size)
    placed: Any = on_npus(ShardingPlan({"": plan})).plan[""]
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    hosts = host_group() if ids_on_host else None
    model.sparse = shard_collection(converted, placed, env, device, host_group=hosts)
    model.over = nn.parallel.DistributedDataParallel(model.over.to(device))
    return model


def train_on_npus(
    rank: int, world_size: int, case: Case, ids_on_host: bool = False, pipeline: bool = False, steps: int = 3
) -> dict[str, Any]:
    """Train on this rank's NPU; the answer is like that of ``cases.train_sharded``, and on the CPU.

    Args:
        rank: of this process.
        world_size: of the group.
        case: what is trained.
        ids_on_host: ids are sent by a group of gloo's, not by that of the NPUs.
        pipeline: train through ``recfx.TrainPipeline``.
        steps: how many.
    """
    device = torch.device("npu", rank)
    torch.npu.set_device(device)
    model = model_on_npus(case, world_size, device, ids_on_host)
    kind, settings = OPTIMIZERS[case.optimizer]
    dense = [p for name, p in model.named_parameters() if case.kernel == "dense" or not name.startswith("sparse")]
    drive = (recfx.TrainPipeline if pipeline else Steps)(model, kind(taken(case, dense), **settings), device)
    source: Iterator[KeyedJaggedTensor] = iter([step[rank] for step in batches(case, world_size, steps)])
    pooled = [drive.progress(source).cpu() for _ in range(steps)]
    sparse = model.sparse
    assert isinstance(sparse, ShardedCollection)
    local = sparse.sharding.local()
    weights = {shard.name: sparse.store.weight(shard.name).detach() for shard in local}
    assert {weight.device for weight in weights.values()} <= {device}
    return {
        "pooled": pooled,
        "shards": [(shard.table.name, shard.rows, shard.columns, weights[shard.name].cpu()) for shard in local],
        "over": model.over.module.weight.detach().cpu(),
        "indexes": {
            shard.name: {key: value.clone() for key, value in sparse.hash_indexes[shard.name].state_dict().items()}
            for shard in local
            if shard.name in sparse.hash_indexes
        },
    }


class Steps:
    """One step after the other, with the pipeline's interface."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device

    def progress(self, source: Iterator[KeyedJaggedTensor]) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss, output = self.model(next(source).to(self.device))
        loss.backward()
        self.optimizer.step()
        return output
