"""The report of sharded collections, on real ranks: where rows are, what the indexes of slices hold."""

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan

import recfx
from recfx.inspect.report import Report
from recfx.inspect.report_data import ShardingReport, ShardReport
from tests.sharding.cases import (
    Case,
    Table,
    batches,
    model_and_plan,
    model_parallel,
    plain_model,
    plan_of,
    with_optimizer,
)
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.typical_cases import FOUR_LARGER as TABLES

RAW = Case(TABLES, optimizer="rowwise_adagrad", hashing=recfx.HashConfig(dense_rows=0, buckets=3), raw_ids=20)
NODES = ("bucketize", "input_dist_start", "input_dist_wait", "hash_ids", "lookup", "output_dist_start")


def codes(report: Report) -> set[tuple[str, str]]:
    return {(reason.code, reason.path.partition("embedding_bags.")[2]) for reason in report.reasons}


@pytest.mark.parametrize("wrapping", ["", "data_parallel", "model_parallel"])
@on_ranks(2)
def test_every_rank_sees_its_share(rank: int, world_size: int, wrapping: str) -> None:
    model, plan = model_and_plan(RAW, world_size)
    (batch,) = (step[rank] for step in batches(RAW, world_size, 1))
    report_of_plan = recfx.explain(model, plan=plan)
    (planned,) = report_of_plan.collections
    if wrapping == "model_parallel":
        model = model_parallel(model, plan)
    else:
        model = recfx.convert(model, plan=plan)
        model = nn.parallel.DistributedDataParallel(model) if wrapping == "data_parallel" else model
    model(batch)[0].backward()
    inner = model.module if wrapping else model
    before = {name: value.clone() for name, value in inner.named_parameters()}
    report = recfx.explain(model)
    torch.testing.assert_close(dict(inner.named_parameters()), before, rtol=0, atol=0)
    ids_held_here = {name: len(index) for name, index in inner.sparse.hash_indexes.items()}
    (collection,) = report.collections
    assert report.ok
    assert (collection.status, collection.kind, collection.device) == ("converted", "EmbeddingBagCollection", "cpu")
    kinds = [node.kind for node in collection.nodes]
    assert set(NODES) <= set(kinds)
    tables = {table.name: table for table in collection.tables}
    assert {table.bytes for table in collection.tables} == {64 * 8 * 4}
    rows = tables["rows"].sharding
    assert rows.shards == (ShardReport(0, (0, 21), (0, 8), 672), ShardReport(1, (21, 64), (0, 8), 1376))
    assert (rows.rank, rows.world_size, rows.sharding_type, rows.compute_kernel) == (rank, 2, "row_wise", "fused")
    assert (rows.rows_here, rows.columns_here, rows.bytes_here) == ((21, 8, 672), (43, 8, 1376))[rank]
    assert tables["whole"].sharding.bytes_here == (0, 2048)[rank]
    assert tables["whole"].optimizer == ("", "fused rowwise_adagrad")[rank]
    assert (tables["whole"].hashing.ids_held is None) == (rank == 0)
    assert tables["columns"].sharding.columns_here == 4
    assert tables["replicas"].sharding.rows_here == 64
    for name, ids_held in ids_held_here.items():
        assert tables[name].hashing.ids_held == ids_held > 0
    slice_of = tables["rows"].hashing
    assert slice_of.rows_here == rows.rows_here
    assert slice_of.occupancy == slice_of.ids_held / rows.rows_here
    assert slice_of.worst_bucket in ((0,), (1, 2))[rank]
    assert ("optimizer_state_per_column_block", "columns") in codes(report)
    assert f"sharding, as rank {rank} of 2 sees it" in str(report)
    plain = json.loads(report.to_json())["collections"][0]["tables"][0]["sharding"]
    assert list(plain) == [field.name for field in dataclasses.fields(ShardingReport)]
    assert plain["shards"][1] == {"rank": 1, "rows": [21, 64], "columns": [0, 8], "bytes": 1376}
    assert [table.sharding for table in planned.tables] == [table.sharding for table in collection.tables]
    assert (planned.nodes, planned.graph) == (collection.nodes, collection.graph)
    assert codes(report_of_plan) == codes(report) | {("weights_not_used", table) for table in tables}


def few_buckets(rank: int, world_size: int) -> tuple[Report, int]:
    config = recfx.HashConfig(dense_rows=0, buckets=2, admit_after=2)
    case = Case((TABLES[0], Table("tiny", 3, 8, ("f3",), "SUM", ("row_wise",))), raw_ids=30, optimizer="adagrad")
    hashing: Any = {"rows": config, "tiny": None}
    model = plain_model(case)
    with_optimizer(case, model.sparse)
    model = recfx.convert(model, hashing=hashing)
    plan = ShardingPlan({"sparse": EmbeddingModuleShardingPlan(plan_of(case, model.sparse, world_size))})
    model = recfx.convert(model, plan=plan)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        ids = torch.randint(0, 53, (40,), generator=generator) * 2**40 + 7
        batch = KeyedJaggedTensor(["f0", "f3"], ids, lengths=torch.tensor([10] * 4 + [0] * 4))
        model(batch)[0].backward()
    return recfx.explain(model), sum(len(index) for index in model.sparse.hash_indexes.values())


def test_ranks_without_rows_and_slices_that_fill() -> None:
    answers = ranks(4).run(few_buckets)
    for rank, (report, ids_held) in enumerate(answers):
        rows, tiny = report.collections[0].tables
        empty = [shard.rank for shard in rows.sharding.shards if shard.bytes == 0]
        assert len(empty) == 2
        assert (rows.sharding.rows_here == 0) == (rank in empty)
        (reason,) = (one for one in rows.reasons if one.code == "ranks_without_rows")
        assert reason.severity == "warning"
        assert str(empty) in reason.message
        assert [one.code for one in tiny.reasons] == ["ranks_without_rows"]
        if rank in empty:
            continue
        assert rows.hashing.ids_held == ids_held
        assert rows.hashing.candidates is not None
        assert rows.hashing.worst_bucket_occupancy == ids_held / 32
        assert ("index_nearly_full" in {one.code for one in rows.reasons}) == (ids_held >= 0.8 * 32)
    assert max(ids_held for _, ids_held in answers) >= 0.8 * 32


@on_ranks(2)
def test_what_is_wrong_with_a_plan_is_in_the_report(rank: int, world_size: int) -> None:
    model, plan = model_and_plan(RAW, world_size)
    tables = dict(plan.plan["sparse"])
    missing = ShardingPlan({"sparse": EmbeddingModuleShardingPlan({"rows": tables["rows"]})})
    misplaced = ShardingPlan({"elsewhere": plan.plan["sparse"]})
    for wrong, reasons in (
        (missing, {"plan_missing_table"}),
        (misplaced, {"plan_missing_collection", "plan_unknown_collection"}),
    ):
        report = recfx.explain(model, plan=wrong)
        assert not report.ok
        assert {reason.code for reason in report.reasons if reason.severity == "error"} == reasons
        assert report.collections[0].tables[0].sharding is None
    sharded = recfx.convert(model, plan=plan)
    report = recfx.explain(sharded, plan=plan)
    assert [reason.code for reason in report.reasons if reason.severity == "error"] == ["already_sharded"]
    dist.barrier()


@on_ranks(2)
def test_a_variable_batch_that_was_expanded(rank: int, world_size: int) -> None:
    case = Case((TABLES[0], TABLES[3]), kernel="dense")
    model, plan = model_and_plan(case, world_size)
    model = recfx.convert(model, plan=plan)
    batch = KeyedJaggedTensor(
        ["f0", "f2"],
        torch.tensor([1, 2, 3]),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["f0", "f2"], torch.tensor([[0, 1, 0], [0, 0, 0]])),
    )
    before = {reason.code for reason in recfx.explain(model).reasons}
    model(batch)[0].backward()
    assert sorted({reason.code for reason in recfx.explain(model).reasons} - before) == ["variable_batch_expanded"]
