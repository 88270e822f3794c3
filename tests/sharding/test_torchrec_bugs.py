"""Plans and arguments that TorchRec 1.8.0 itself gets wrong (notes of the project): ours equal the unsharded model.

Where it is cheap, TorchRec's own answer is computed as well, and must be wrong: when it no longer is, the reason for
some of our code is gone.
"""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan

import recfx
from tests.sharding.cases import Case, Table, batches, build, check, plan_of, shard, train_sharded
from tests.sharding.ranks import ranks


def two_tables(first: tuple[Any, ...], second: tuple[Any, ...], pooling: str = "SUM", dim: int = 8) -> Case:
    tables = Table("a", 11, dim, ("f0",), pooling, first), Table("b", 13, dim, ("f1",), "MEAN", second)
    return Case(tables, local_size=2)


MEANS = {
    "table_wise_sum_beside_row_wise_mean": two_tables(("table_wise", 0), ("row_wise",)),
    "data_parallel_sum_beside_row_wise_mean": two_tables(("data_parallel",), ("row_wise",)),
    "table_wise_mean_beside_row_wise_mean": two_tables(("table_wise", 1), ("row_wise",), "MEAN"),
    "grid_mean": two_tables(("grid_shard", 0, 1), ("grid_shard", 1, 0), "MEAN", 256),
}


def pooled(rank: int, world_size: int, case: Case) -> dict[str, dict[str, torch.Tensor]]:
    """By key: what the unsharded collection, ours and TorchRec's give."""
    standard, _ = build(case)
    ((batch, *_),) = (step[rank:] for step in batches(case, world_size, 1))
    ours = shard(case, copy.deepcopy(standard), world_size)
    plan = plan_of(case, recfx.convert(standard), world_size)
    for parameter in plan.values():
        if parameter.sharding_type == "data_parallel":
            parameter.compute_kernel = "dense"
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(case.local_size)}):
        theirs = EmbeddingBagCollectionSharder().shard(copy.deepcopy(standard), plan, env, torch.device("cpu"))
    with torch.no_grad():
        answers = {"unsharded": standard(batch), "ours": ours(batch).wait(), "torchrec": theirs(batch).wait()}
    assert answers["ours"].keys() == answers["unsharded"].keys()
    return {name: {key: keyed[key].clone() for key in keyed.keys()} for name, keyed in answers.items()}  # noqa: SIM118


@pytest.mark.parametrize("name", sorted(MEANS))
def test_mean_in_mixed_plans(name: str) -> None:
    case, world_size = MEANS[name], 4 if name == "grid_mean" else 2
    answers = ranks(world_size).run(pooled, case)
    check(case, world_size, ranks(world_size).run(train_sharded, case))
    for answer in answers:
        torch.testing.assert_close(answer["ours"], answer["unsharded"], rtol=1e-5, atol=1e-6)
    assert any(
        not torch.allclose(answer["torchrec"][key], answer["unsharded"][key], 1e-3)
        for answer in answers
        for key in answer["ours"]
    )


def test_keys_stand_in_the_unsharded_order() -> None:
    kinds: tuple[tuple[Any, ...], ...] = (("row_wise",), ("table_wise", 1), ("data_parallel",), ("table_wise", 0))
    case = Case(tuple(Table(f"t{i}", 9, 8, (f"f{3 - i}",), "SUM", kind) for i, kind in enumerate(kinds)))
    for answer in ranks(2).run(pooled, case):
        assert list(answer["ours"]) == list(answer["unsharded"]) == ["f3", "f2", "f1", "f0"]
        assert list(answer["torchrec"]) != list(answer["unsharded"])


def settings_after(rank: int, world_size: int, ours: bool) -> list[dict[str, Any]]:
    case = Case((Table("a", 11, 8, ("f0",), "SUM", ("row_wise",)),))
    standard, _ = build(case)
    in_backward, fused_params = {"lr": 0.5}, {"learning_rate": 0.25}
    _apply_optimizer_in_backward(torch.optim.SGD, standard.parameters(), in_backward)
    converted = recfx.convert(standard)
    plan = plan_of(case, converted, world_size)
    (sharder, *_) = recfx.sharders(fused_params=fused_params) if ours else [EmbeddingBagCollectionSharder(fused_params)]
    DistributedModelParallel(
        torch.nn.ModuleDict({"sparse": converted if ours else standard}),
        device=torch.device("cpu"),
        plan=ShardingPlan({"sparse": EmbeddingModuleShardingPlan(plan)}),
        sharders=[sharder],
    )
    return [in_backward, fused_params]


def test_settings_of_optimizers_are_not_written_into() -> None:
    assert ranks(2).run(settings_after, True) == [[{"lr": 0.5}, {"learning_rate": 0.25}]] * 2
    assert ranks(2).run(settings_after, False) != [[{"lr": 0.5}, {"learning_rate": 0.25}]] * 2
