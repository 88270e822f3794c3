"""DistributedDataParallel and FSDP with a sharded model: the dense part is theirs, and they leave tables alone."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import recfx
from tests.sharding.cases import (
    FORMS,
    OPTIMIZERS,
    Case,
    Table,
    batches,
    check,
    dense_parameters,
    model_and_plan,
    plain_model,
    sharded_model,
    shards_of,
)
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.typical_cases import FOUR
from tests.support.needs import needs
from tests.support.refusals import refused

TABLES = tuple(table for table in FOUR if table.name != "columns")


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: Any) -> Any:
        return self.inner(features)


def train(rank: int, world_size: int, case: Case, around: bool = False) -> dict[str, Any]:
    sharded: Any = sharded_model(case, world_size)
    replicas = nn.parallel.DistributedDataParallel(Around(sharded) if around else sharded)
    synchronized = {id(parameter) for parameter in replicas._module_parameters}
    assert synchronized == {id(parameter) for parameter in sharded.over.parameters()}
    kind, settings = OPTIMIZERS[case.optimizer]
    optimizer = kind(dense_parameters(case, sharded), **settings)
    pooled = []
    for step in batches(case, world_size, 3):
        optimizer.zero_grad()
        loss, output = replicas(step[rank])
        loss.backward()
        optimizer.step()
        pooled.append(output)
    return {"pooled": pooled, "shards": shards_of(sharded.sparse), "over": sharded.over.weight.detach()}


@pytest.mark.parametrize(("kernel", "form"), [("fused", "pooled"), ("fused", "rows"), ("dense", "pooled")])
def test_it_trains_as_the_unsharded_model(kernel: str, form: str) -> None:
    case = FORMS[form](Case(TABLES, optimizer="adagrad", kernel=kernel, sizes=(3, 4)))
    check(case, 2, ranks(2).run(train, case))


def test_a_model_around_the_sharded_one_trains_as_the_unsharded_model() -> None:
    """Rows are cut into equal halves: taken for replicas, they would all become those of rank 0."""
    tables = (Table("a", 12, 8, ("f0",), "SUM", ("row_wise",)), Table("b", 6, 8, ("f1", "f0"), "MEAN", ("row_wise",)))
    case = Case(tables, optimizer="adagrad")
    check(case, 2, ranks(2).run(train, case, True))


def sharded_dense(rank: int, world_size: int, order: str) -> list[torch.Tensor]:
    """Outputs, and the dense layer's gradient, with FSDP2 on that layer before or after the conversion, or never."""
    case = Case(TABLES)
    model: Any = plain_model(case)
    if order == "first, in place":
        fully_shard(model.over)
        recfx.convert(model, inplace=True)
    elif order == "then":
        model = recfx.convert(model)
        fully_shard(model.over)
    elif order == "around":
        model = recfx.convert(model)
        fully_shard(model, ignored_params=set(model.sparse.parameters()))
    loss, pooled = model(batches(case, world_size, 1)[0][0])
    loss.backward()
    gradient = model.over.weight.grad
    return [loss.detach(), pooled.detach(), gradient if order == "never" else gradient.full_tensor()]


@needs(not torch.__version__.startswith("2.7."), "torch 2.9: FSDP of 2.7 does not average over gloo")
def test_fsdp_after_the_conversion_and_before_one_in_place() -> None:
    expected = ranks(2).run(sharded_dense, "never")[0]
    for order in ("first, in place", "then", "around"):
        for weights in ranks(2).run(sharded_dense, order):
            torch.testing.assert_close(weights, expected)


@on_ranks(2)
def test_copies_of_what_fsdp_has_are_refused_with_what_to_do(rank: int, world_size: int) -> None:
    case = Case(TABLES)
    model: Any = plain_model(case)
    converted, plan = model_and_plan(case, world_size)
    fully_shard(model.over)
    fully_shard(converted.over)
    assert recfx.convert(converted) is converted
    features = batches(case, world_size, 1)[0][0]
    calls: list[Any] = [
        lambda: recfx.convert(model),
        lambda: recfx.convert(model, (features,)),
        lambda: recfx.convert(converted, plan=plan),
        lambda: recfx.convert(converted, (features,), whole_graph=True, inplace=True),
        lambda: recfx.unconvert(converted),
        lambda: recfx.export(converted, "not_written.pt", (features,)),
    ]
    for number, call in enumerate(calls):
        with refused("fully_sharded", "over") as caught:
            call()
        assert "fully_shard afterwards" in caught.value.what_to_do
        assert ("inplace=True" in caught.value.what_to_do) == (number < 3)
    report = recfx.explain(model)
    assert not report.ok
    assert "[fully_sharded] over" in str(report) or "fully_sharded" in report.to_json()
    for trained in (model, converted):
        trained(features)[0].backward()  # as before
