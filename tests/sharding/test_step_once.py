"""A sharded collection that is called several times per step: one step of its fused optimizers, as unsharded."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

import recfx
from tests.builders.optimizers import attach
from tests.sharding.cases import (
    Case,
    Table,
    batches,
    build,
    concatenate,
    plain_model,
    shard,
    shard_converted,
    shards_of,
    with_optimizer,
)
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.stateful import gather
from tests.sharding.typical_cases import FOUR
from tests.support.refusals import refused

CASE = Case(FOUR, sizes=(3, 4))
CALLS = (2, 1, 3)  # per step


def loss(pooled: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(
        [(number + 1) * (output.square().mean() - output.mean()) for number, output in enumerate(pooled)]
    ).sum()


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@on_ranks(2)
def test_several_calls_are_one_step(rank: int, world_size: int, optimizer: str) -> None:
    tables = FOUR if optimizer != "rowwise_adagrad" else tuple(t for t in FOUR if t.name != "columns")
    case = replace(CASE, optimizer=optimizer, tables=tables)
    plain = with_optimizer(case, copy.deepcopy(build(case)[0]))
    model = shard(case, build(case)[0], world_size)
    steps = iter(batches(case, world_size, sum(CALLS)))
    for calls in CALLS:
        taken = [next(steps) for _ in range(calls)]
        loss([model(call[rank]).values() for call in taken]).backward()
        of_all = [plain(concatenate(call)).values().split(case.batch_sizes(world_size)) for call in taken]
        losses = [loss([call[other_rank] for call in of_all]) for other_rank in range(world_size)]
        (torch.stack(losses).sum() / world_size).backward()
        state = {name: gather(value) for name, value in model.state_dict().items()}
        expected = {name: value.detach() for name, value in plain.state_dict().items()}
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["hook", "post_accumulate"])
@on_ranks(2)
def test_a_gradient_hook_on_a_fused_shard_is_refused_before_anything_is_sent(
    rank: int, world_size: int, kind: str
) -> None:
    case = replace(CASE, optimizer="adagrad")
    model = shard(case, build(case)[0], world_size)
    (batch,) = (step[rank] for step in batches(case, world_size, 1))
    weight: Any = model.embedding_bags["replicas"].weight
    register = weight.register_hook if kind == "hook" else weight.register_post_accumulate_grad_hook
    handle = register(lambda gradient: None)
    with refused("gradient_hook", match="'replicas'"):
        model(batch)
    handle.remove()
    assert torch.isfinite(model(batch).values()).all()


@on_ranks(1)
def test_an_optimizer_without_a_fused_form_attached_after_conversion_is_not_dropped(rank: int, world_size: int) -> None:
    converted: Any = recfx.convert(build(CASE)[0])
    attach(converted, torch.optim.AdamW)
    with refused("optimizer_not_fused"):
        shard_converted(CASE, converted, 1)


@pytest.mark.parametrize("with_lookups", [True, False])
@on_ranks(2)
def test_a_gradient_of_a_fused_shard_from_elsewhere_is_refused_and_steps_nothing(
    rank: int, world_size: int, with_lookups: bool
) -> None:
    """Where all ranks would wait for each other's lookups, all of them raise."""
    case = replace(CASE, optimizer="adagrad")
    model = shard(case, build(case)[0], world_size)
    (batch,) = (step[rank] for step in batches(case, world_size, 1))
    weight: Any = model.embedding_bags["replicas"].weight
    before = weight.detach().clone()
    pooled = model(batch).values().square().mean()  # before the backward: kernels are chosen in the first forward
    with refused("shard_read_elsewhere", "embedding_bags.replicas.weight"):
        (weight.square().mean() + (pooled if with_lookups else 0.0)).backward()
    assert torch.equal(weight, before)


# What comes between steps, and ordinary gradients

FLOW = Case(
    (
        Table("a", 11, 8, ("f0",), "SUM", ("table_wise", 1)),
        Table("b", 13, 8, ("f1", "f0"), "MEAN", ("row_wise",)),
        Table("c", 9, 8, ("f2",), "MEAN", ("data_parallel",)),
        Table("d", 9, 8, ("f2",), "SUM", ("column_wise", 0, 1)),
    )
)


def accumulate(rank: int, world_size: int, case: Case) -> list[tuple[str, Any, Any, torch.Tensor]]:
    """Two forwards, two backwards, one step of an ordinary optimizer."""
    model = plain_model(case)
    model.sparse = shard(case, model.sparse, world_size)
    optimizer = torch.optim.SGD(model.sparse.parameters(), lr=1.0)
    losses = [model(step[rank])[0] for step in batches(case, world_size, 2)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    return shards_of(model.sparse)


def test_gradients_add_up_over_batches() -> None:
    case = Case(FLOW.tables, kernel="dense")
    answers = ranks(2).run(accumulate, case)
    model = plain_model(case)
    optimizer = torch.optim.SGD(model.sparse.parameters(), lr=1.0)
    for step in batches(case, 2, 2):
        out = model.over(model.sparse(concatenate(step)).values()).tanh() ** 2
        (sum(part.mean() for part in out.split(case.batch_sizes(2))) / 2).backward()
    optimizer.step()
    for shards in answers:
        for name, rows, columns, weight in shards:
            expected = model.sparse.embedding_bags[name].weight.detach()[slice(*rows), slice(*columns)]
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)
