"""Sharded collections under torch.fx tracers: one leaf call each, whose result is awaited where it is used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torchrec.fx
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

import recfx
from tests.sharding.cases import Case, Model, Table, batches, build, plan_of, with_optimizer
from tests.sharding.ranks import ranks

TABLES = (
    Table("rows", 11, 8, ("f0",), "SUM", ("row_wise",)),
    Table("whole", 13, 8, ("f1", "f0"), "MEAN", ("table_wise", 1)),
)
CASES = {
    "static": Case(TABLES, optimizer="adagrad", sizes=(3, 4)),
    "hashed": Case(
        tuple(replace(table, rows=64) for table in TABLES),
        hashing=recfx.HashConfig(dense_rows=0, buckets=4),
        raw_ids=20,
        sizes=(3, 4),
    ),
}


def made(case: Case, world_size: int, form: str) -> torch.nn.Module:
    standard, width = build(case)
    torch.manual_seed(1)
    model = Model(with_optimizer(case, standard), width)
    plan = plan_of(case, recfx.convert(standard, hashing=case.hashing), world_size)
    if form == "convert":
        sharding = ShardingPlan({"sparse": EmbeddingModuleShardingPlan(plan)})
        return recfx.convert(model, hashing=case.hashing, plan=sharding)
    converted = recfx.convert(model, hashing=case.hashing)
    return DistributedModelParallel(
        converted,
        device=torch.device("cpu"),
        plan=ShardingPlan({"sparse": EmbeddingModuleShardingPlan(plan)}),
        sharders=recfx.sharders(),
        init_data_parallel=False,
    )


def traced(rank: int, world_size: int, case: Case, form: str, tracer: str) -> dict[str, Any]:
    trace = {"torch": torch.fx.symbolic_trace, "torchrec": torchrec.fx.symbolic_trace}[tracer]
    reference, model = made(case, world_size, form), made(case, world_size, form)
    graph = trace(model)
    for step in batches(case, world_size, 2):
        wanted, found = reference(step[rank]), graph(step[rank])
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        wanted[0].backward()
        found[0].backward()
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
    return {"calls": [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]}


@pytest.mark.parametrize("tracer", ["torch", "torchrec"])
@pytest.mark.parametrize("name", CASES)
def test_a_sharded_collection_is_one_leaf(name: str, tracer: str) -> None:
    for answer in ranks(2).run(traced, CASES[name], "convert", tracer):
        assert [call for call in answer["calls"] if "sparse" in call] == ["sparse"]


def test_torchrecs_tracer_goes_through_distributed_model_parallel() -> None:
    for answer in ranks(2).run(traced, CASES["static"], "wrapped", "torchrec"):
        assert [call for call in answer["calls"] if "sparse" in call] == ["_dmp_wrapped_module.sparse"]
