"""TorchRec's own flow around sharded tables: schedules, gradient accumulation, evaluation, optimizer arguments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import recfx
from tests.builders.optimizers import attach
from tests.sharding.cases import Case, Model, Table, batches, build, concatenate, plan_of, shard, shards_of
from tests.sharding.ranks import ranks

CASE = Case(
    (
        Table("a", 11, 8, ("f0",), "SUM", ("table_wise", 1)),
        Table("b", 13, 8, ("f1", "f0"), "MEAN", ("row_wise",)),
        Table("c", 9, 8, ("f2",), "MEAN", ("data_parallel",)),
        Table("d", 9, 8, ("f2",), "SUM", ("column_wise", 0, 1)),
    )
)
STEPS = 4


def parallel_model(case: Case, world_size: int) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Converted, sharded and wrapped by TorchRec, with one optimizer for everything."""
    standard, width = build(case)
    torch.manual_seed(1)
    model = recfx.convert(Model(standard, width))
    attach(model.sparse, torch.optim.SGD, lr=1.0)
    plan = ShardingPlan({"sparse": EmbeddingModuleShardingPlan(plan_of(case, model.sparse, world_size))})
    wrapped = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=recfx.sharders(),
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(wrapped.named_parameters())), lambda params: torch.optim.SGD(params, lr=1.0)
    )
    return wrapped, CombinedOptimizer([wrapped.fused_optimizer, dense])


def train_with_schedule(rank: int, world_size: int, case: Case) -> list[torch.Tensor]:
    model, optimizer = parallel_model(case, world_size)
    pooled = []
    for number, step in enumerate(batches(case, world_size, STEPS)):
        for group in optimizer.param_groups:
            group["lr"] = _rate(number)
        optimizer.zero_grad()
        loss, found = model(step[rank])
        loss.backward()
        optimizer.step()
        pooled.append(found)
    return pooled


def _rate(step: int) -> float:
    return 2.0 / (step + 1)


def test_a_learning_rate_schedule_reaches_every_table() -> None:
    answers = ranks(2).run(train_with_schedule, CASE)
    standard, width = build(CASE)
    torch.manual_seed(1)
    model = Model(standard, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sizes = CASE.batch_sizes(2)
    for number, step in enumerate(batches(CASE, 2, STEPS)):
        optimizer.param_groups[0]["lr"] = _rate(number)
        optimizer.zero_grad()
        pooled = model.sparse(concatenate(step)).values()
        out = model.over(pooled).tanh() ** 2
        (sum(part.mean() for part in out.split(sizes)) / 2).backward()
        optimizer.step()
        for rank, expected in enumerate(pooled.detach().split(sizes)):
            torch.testing.assert_close(answers[rank][number], expected, rtol=1e-5, atol=1e-6)


def evaluate_between_steps(rank: int, world_size: int, case: Case) -> bool:
    """Whether eval, and forwards without gradient, leave training as it is."""
    found = []
    for disturb in (False, True):
        standard, width = build(case)
        torch.manual_seed(1)
        model = Model(standard, width)
        model.sparse = shard(case, standard, world_size)
        for step in batches(case, world_size, STEPS):
            if disturb:
                model.eval()
                with torch.no_grad():
                    model(batches(Case(**{**case.__dict__, "seed": 5}), world_size, 1)[0][rank])
                model.train()
            loss, pooled = model(step[rank])
            loss.backward()
            found.append(pooled)
    return all(torch.equal(a, b) for a, b in zip(found[:STEPS], found[STEPS:], strict=True))


@pytest.mark.parametrize("hashing", [None, recfx.HashConfig(dense_rows=0, rows=64, buckets=4, on_full="evict")])
def test_evaluation_between_steps_changes_nothing(hashing: recfx.HashConfig | None) -> None:
    case = Case(CASE.tables, hashing=hashing, raw_ids=0 if hashing is None else 60)
    assert all(ranks(2).run(evaluate_between_steps, case))


def accumulate(rank: int, world_size: int, case: Case) -> list[tuple[str, Any, Any, torch.Tensor]]:
    """Two forwards, two backwards, one step of an ordinary optimizer."""
    standard, width = build(case)
    torch.manual_seed(1)
    model = Model(standard, width)
    model.sparse = shard(case, standard, world_size)
    optimizer = torch.optim.SGD(model.sparse.parameters(), lr=1.0)
    losses = [model(step[rank])[0] for step in batches(case, world_size, 2)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    return shards_of(model.sparse)


def test_gradients_add_up_over_batches() -> None:
    case = Case(CASE.tables, kernel="dense")
    answers = ranks(2).run(accumulate, case)
    standard, width = build(case)
    torch.manual_seed(1)
    model = Model(standard, width)
    optimizer = torch.optim.SGD(standard.parameters(), lr=1.0)
    for step in batches(case, 2, 2):
        out = model.over(model.sparse(concatenate(step)).values()).tanh() ** 2
        (sum(part.mean() for part in out.split(case.batch_sizes(2))) / 2).backward()
    optimizer.step()
    for shards in answers:
        for name, rows, columns, weight in shards:
            expected = standard.embedding_bags[name].weight.detach()[slice(*rows), slice(*columns)]
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


def refuse_arguments(rank: int, world_size: int, case: Case) -> list[str]:
    reasons = []
    for kind, settings in ((torch.optim.SGD, {"lr": 1.0, "momentum": 0.9}), (torch.optim.AdamW, {"lr": 1.0})):
        given = copy.deepcopy(settings)
        standard, _ = build(case)
        _apply_optimizer_in_backward(kind, standard.parameters(), given)
        try:
            shard(Case(**{**case.__dict__, "kernel": "dense"}), standard, world_size)
        except recfx.ConversionError as error:
            reasons.append(error.reason)
        assert given == settings  # sharding leaves the user's dict alone
    return reasons


def test_optimizer_arguments_without_a_fused_form_are_errors() -> None:
    for reasons in ranks(2).run(refuse_arguments, CASE):
        assert reasons == ["unsupported_optimizer_argument", "optimizer_not_fused"]
