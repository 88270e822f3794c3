"""``convert`` with ranks and without a plan: the plan is that of ``recfx.plan``, the same on all ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.planner import shard_model
from tests.sharding.ranks import ranks


def model() -> nn.Module:
    tables = [
        EmbeddingBagConfig(name=f"t{number}", num_embeddings=50, embedding_dim=8, feature_names=[f"f{number}"])
        for number in range(4)
    ]
    return nn.ModuleDict({"ebc": EmbeddingBagCollection(tables)})


def types_and_plan(rank: int, world_size: int) -> tuple[Any, Any]:
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = recfx.convert(model(), env=env, verify=False).get_submodule("ebc")
    plan: Any = recfx.plan(model(), Topology(world_size, "cpu")).plan["ebc"]
    found = {each.table.name: each.type.name for each in sharded.sharding.tables}
    return found, {name: each.sharding_type for name, each in plan.items()}


def test_the_plan_is_that_of_recfx() -> None:
    """TorchRec's planner would cut each of these small tables by rows."""
    first, second = ranks(2).run(types_and_plan)
    assert first == second
    found, expected = first
    assert found == expected
    assert "row_wise" not in found.values()


def refused(rank: int, world_size: int) -> str:
    def fail(*_: Any) -> Any:
        raise recfx.ConversionError("too large", reason="plan_does_not_fit")

    with mock.patch.object(shard_model, "make_plan", fail):
        try:
            recfx.convert(model(), env=ShardingEnv.from_process_group(dist.group.WORLD), verify=False)
        except recfx.ConversionError as error:
            return error.reason
    return ""


def test_all_ranks_get_the_error_of_the_one_that_plans() -> None:
    assert ranks(2).run(refused) == ["plan_does_not_fit"] * 2
