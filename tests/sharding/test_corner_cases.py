"""Sharded training in ways that users have and the other tests have not, against the unsharded model."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

import recfx
from tests.sharding import cases
from tests.sharding.cases import (
    Case,
    Model,
    Table,
    batches,
    build,
    check,
    model_and_plan,
    model_parallel,
    plain_model,
    shard,
    train_sharded,
    values_of,
    variable_batch,
)
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.stateful import gather

MIXED = (
    Table("rows", 11, 8, ("f0", "shared"), "SUM", ("row_wise",)),
    Table("whole", 13, 8, ("f1",), "SUM", ("table_wise", 1)),
    Table("columns", 9, 8, ("f2", "shared"), "SUM", ("column_wise", 1, 0)),
    Table("replicas", 5, 8, ("f3",), "SUM", ("data_parallel",)),
)

# Types of ids, lengths and weights by rank.
TYPES: dict[str, tuple[tuple[torch.dtype, torch.dtype, torch.dtype], ...]] = {
    "all_short": ((torch.int32, torch.int32, torch.float32),) * 2,
    "short_beside_long": ((torch.int32, torch.int32, torch.float64), (torch.int64, torch.int64, torch.float32)),
}


def train_on(rank: int, world_size: int, case: Case, types: str) -> dict[str, Any]:
    def of_types(*arguments: Any) -> list[list[KeyedJaggedTensor]]:
        return [[_cast(kjt, *TYPES[types][i]) for i, kjt in enumerate(step)] for step in batches(*arguments)]

    with mock.patch.object(cases, "batches", of_types):
        return train_sharded(rank, world_size, case)


def _cast(batch: KeyedJaggedTensor, ids: torch.dtype, lengths: torch.dtype, weights: torch.dtype) -> KeyedJaggedTensor:
    weighted = batch.weights_or_none()
    return KeyedJaggedTensor(
        batch.keys(),
        batch.values().to(ids),
        None if weighted is None else weighted.to(weights),
        lengths=batch.lengths().to(lengths),
    )


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("types", sorted(TYPES))
def test_types_of_ids_lengths_and_weights(types: str, is_weighted: bool) -> None:
    case = Case(MIXED, is_weighted=is_weighted, sizes=(3, 4))
    check(case, 2, ranks(2).run(train_on, case, types))


class Compiled(Model):
    """Compiled in place: its names stay."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.compile(backend="eager")


@on_ranks(2)
def test_means_are_those_of_the_lengths_of_the_call(rank: int, world_size: int) -> None:
    """What one process answers, and what ranks do if the lengths change before the output is read."""
    case = Case(tuple(replace(table, pooling="MEAN") for table in MIXED))
    standard, _ = build(case)
    sharded = shard(case, standard, world_size)
    batch = batches(case, world_size, 1)[0][rank]
    lengths = batch.lengths().clone()
    output = sharded(KeyedJaggedTensor(batch.keys(), batch.values(), batch.weights_or_none(), lengths=lengths))
    lengths.zero_()
    # Sums of float32 in another order.
    torch.testing.assert_close(values_of(output), values_of(standard(batch)), rtol=1e-6, atol=1e-6)


def train_compiled(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    with mock.patch.object(cases, "Model", Compiled):
        return train_sharded(rank, world_size, case)


def test_compiled() -> None:
    case = Case(MIXED, sizes=(3, 4))
    check(case, 2, ranks(2).run(train_compiled, case))


def weights_that_are_trained(rank: int, world_size: int) -> torch.Tensor | str:
    case = Case(MIXED, is_weighted=True)
    model = shard(case, build(case)[0], world_size)
    batch = batches(case, world_size, 1)[0][rank]
    weights = batch.weights().requires_grad_()
    try:
        model(batch).values().sum().backward()
    except recfx.InputError as error:
        with torch.no_grad():
            assert model(batch).values().isfinite().all()
        return error.reason
    assert weights.grad is not None
    return weights.grad


def test_gradients_of_weights_are_not_lost_without_a_word() -> None:
    assert ranks(2).run(weights_that_are_trained) == ["weights_require_grad"] * 2
    case = Case(MIXED, is_weighted=True)
    standard, _ = build(case)
    batch = batches(case, 1, 1)[0][0]
    weights = batch.weights().requires_grad_()
    standard(batch).values().sum().backward()
    torch.testing.assert_close(ranks(1).run(weights_that_are_trained)[0], weights.grad)


@on_ranks(2)
def test_settings_of_optimizers_are_not_written_into(rank: int, world_size: int) -> None:
    """As TorchRec's sharders do."""
    standard, _ = build(Case(MIXED))
    in_backward, fused_params = {"lr": 0.5}, {"learning_rate": 0.25}
    _apply_optimizer_in_backward(torch.optim.SGD, standard.parameters(), in_backward)
    model = torch.nn.ModuleDict({"sparse": recfx.convert(standard)})
    DistributedModelParallel(model, device=torch.device("cpu"), sharders=recfx.sharders(fused_params=fused_params))
    assert [in_backward, fused_params] == [{"lr": 0.5}, {"learning_rate": 0.25}]


@on_ranks(2)
def test_a_schedule_and_variable_batches(rank: int, world_size: int) -> None:
    """DistributedModelParallel, a schedule over its optimizers, and variable batches; what is found and expected."""
    case = Case(MIXED)
    oracle, wrapped = plain_model(case), model_parallel(*model_and_plan(case, world_size))
    dense = {name: parameter for name, parameter in wrapped.named_parameters() if "over" in name}
    kind, settings = cases.OPTIMIZERS[case.optimizer]
    both = CombinedOptimizer(
        [("", wrapped.fused_optimizer), ("over", KeyedOptimizerWrapper(dense, lambda params: kind(params, **settings)))]
    )
    optimizers = both, kind(oracle.parameters(), **settings)
    schedules = [torch.optim.lr_scheduler.StepLR(inner, step_size=1, gamma=0.5) for inner in optimizers]
    compared = []
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, output = wrapped(variable_batch(rank, step)[0])
        loss.backward()
        everybody = [oracle(variable_batch(other_rank, step)[1]) for other_rank in range(world_size)]
        torch.stack([loss for loss, _ in everybody]).mean().backward()
        for stepped in (*optimizers, *schedules):
            stepped.step()
        compared.append((output, everybody[rank][1]))
    state = wrapped.module.sparse.state_dict()
    compared += [(gather(state[name]), weight.detach()) for name, weight in oracle.sparse.named_parameters()]
    dist.barrier()
    for output, expected in compared:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
