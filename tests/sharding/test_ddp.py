"""DistributedDataParallel around a sharded model: it averages the dense part and leaves sharded tables alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

import recfx
from tests.sharding.cases import OPTIMIZERS, Case, Model, Table, batches, build, check, plan_of, with_optimizer
from tests.sharding.ranks import ranks

TABLES = (
    Table("rows", 11, 8, ("f0",), "SUM", ("row_wise",)),
    Table("whole", 13, 8, ("f1", "f0"), "MEAN", ("table_wise", 1)),
    Table("replicas", 5, 8, ("f2",), "SUM", ("data_parallel",)),
)


class Around(nn.Module):
    """What the user builds around a sharded model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: Any) -> Any:
        return self.inner(features)


def train(rank: int, world_size: int, case: Case, around: bool = False) -> dict[str, Any]:
    standard, width = build(case)
    torch.manual_seed(1)
    model = Model(with_optimizer(case, standard), width)
    converted = recfx.convert(model)
    plan = ShardingPlan({"sparse": EmbeddingModuleShardingPlan(plan_of(case, converted.sparse, world_size))})
    sharded = recfx.convert(converted, plan=plan)
    replicas = nn.parallel.DistributedDataParallel(Around(sharded) if around else sharded)
    synchronized = {id(parameter) for parameter in replicas._module_parameters}
    assert synchronized == {id(parameter) for parameter in sharded.over.parameters()}
    kind, settings = OPTIMIZERS[case.optimizer]
    dense = [p for name, p in sharded.named_parameters() if case.kernel == "dense" or not name.startswith("sparse")]
    optimizer = kind(dense, **settings)
    pooled = []
    for step in batches(case, world_size, 3):
        optimizer.zero_grad()
        loss, found = replicas(step[rank])
        loss.backward()
        optimizer.step()
        pooled.append(found)
    shards = [
        (each.table.name, each.rows, each.columns, sharded.sparse.store.weight(each.name).detach().clone())
        for each in sharded.sparse.sharding.local()
    ]
    return {"pooled": pooled, "shards": shards, "over": sharded.over.weight.detach()}


@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_it_trains_as_the_unsharded_model(kernel: str) -> None:
    case = Case(TABLES, optimizer="adagrad", kernel=kernel, sizes=(3, 4))
    check(case, 2, ranks(2).run(train, case))


def test_a_model_around_the_sharded_one_trains_as_the_unsharded_model() -> None:
    """Rows are cut into equal halves: taken for replicas, they would all become those of rank 0."""
    tables = (Table("a", 12, 8, ("f0",), "SUM", ("row_wise",)), Table("b", 6, 8, ("f1", "f0"), "MEAN", ("row_wise",)))
    case = Case(tables, optimizer="adagrad")
    check(case, 2, ranks(2).run(train, case, True))
