"""What ranks bring when they shard: replicas become those of rank 0."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import EmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.sharding.collection import shard_collection
from tests.sharding.cases import Case, Table, batches, build, plan_of, with_optimizer
from tests.sharding.ranks import ranks

REPLICATED = (Table("a", 11, 8, ("f0",), "SUM", ("data_parallel",)),)


def shard_what_was_trained_apart(rank: int, world_size: int, optimizer: str) -> dict[str, Tensor]:
    """Each rank trains a collection of its own first, rank 1 for longer."""
    case = Case(REPLICATED, optimizer=optimizer)
    standard: EmbeddingBagCollection = build(case)[0]
    module = with_optimizer(case, recfx.convert(standard))
    assert isinstance(module, recfx.HashEmbeddingBagCollection)
    for step in batches(case, world_size, 1 + rank):
        module(step[rank]).values().sum().backward()
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = shard_collection(module, plan_of(case, module, world_size), env)
    fused = sharded.store.optimizers["a"]
    return {"weight": sharded.store.weight("a").detach(), **fused.named_state()}


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad", "adam"])
def test_replicas_begin_with_the_weights_and_optimizer_state_of_rank_0(optimizer: str) -> None:
    first, second = ranks(2).run(shard_what_was_trained_apart, optimizer)
    assert first.keys() == second.keys()
    assert len(first) > 1
    for name, value in first.items():
        assert bool(value.any()), name
        assert torch.equal(value, second[name]), name
