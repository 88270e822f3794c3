"""Activation checkpointing around sharded tables that admit ids: the same as without it, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import recfx
from recfx.errors import InputError
from tests.sharding.cases import Case, Table, batches, build, shard
from tests.sharding.ranks import ranks
from tests.sharding.stateful import make, sharded_of
from tests.sharding.typical_cases import TYPES


def train(rank: int, world_size: int, case: Case, use_reentrant: bool | None) -> list[torch.Tensor]:
    """Two batches forwarded, then both backwarded; what that leaves on this rank. The optimizer is outside."""
    standard, width = build(case)
    model: Any = shard(case, standard, world_size)
    scale = torch.ones(width, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    both = iter(batches(case, world_size, 6))
    for first, second in zip(both, both, strict=True):
        losses = []
        for each in (first, second):

            def forward(scale: torch.Tensor, each: Any = each) -> torch.Tensor:
                return (model(each[rank]).values() * scale).exp().sum()

            losses.append(
                forward(scale) if use_reentrant is None else checkpoint(forward, scale, use_reentrant=use_reentrant)
            )
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    left = [scale.detach()]
    for each in model.sharding.local():
        left += [model.store.weight(each.name).detach(), *model.hash_indexes[each.name].state_dict().values()]
    return [tensor.clone() for tensor in left]


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_checkpointed_batches_train_the_same_as_others(kind: str) -> None:
    config = recfx.HashConfig(dense_rows=0, rows=32, buckets=2, admit_after=2, on_full="share")
    tables = (Table("a", 11, 8, ("f0",), "SUM", TYPES[kind]), Table("b", 13, 8, ("f1", "f0"), "MEAN", TYPES[kind]))
    case = Case(tables, hashing=config, raw_ids=40, optimizer="sgd", kernel="dense", sizes=(3, 5))
    pair = ranks(2)
    expected = pair.run(train, case, None)
    for use_reentrant in (False, True):
        for rank, found in enumerate(pair.run(train, case, use_reentrant)):
            assert len(found) == len(expected[rank])
            assert all(torch.equal(mine, other) for mine, other in zip(found, expected[rank], strict=True))


ON_RANK_0 = {  # rank 1 has no part of the table whose rows are given away
    "replayed_ids_evicted": recfx.HashConfig(dense_rows=0, on_full="evict"),
    "replayed_rows_renewed": recfx.HashConfig(dense_rows=0, on_full="share", admit_after=2, unseen="share"),
}


def late(rank: int, world_size: int, case: Case, use_reentrant: bool) -> list[str]:
    """Backwards of checkpointed batches, most of which come too late: what they raise on this rank."""
    model = make(case, world_size)
    sparse, one = sharded_of(model), torch.ones(1, requires_grad=True)

    def loss(one: torch.Tensor, features: Any) -> torch.Tensor:
        return (sparse(features).values() * one).sum()

    steps = batches(case, world_size, 12)
    found = []
    for waiting in [checkpoint(loss, one, step[rank], use_reentrant=use_reentrant) for step in steps]:
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        try:
            waiting.backward()
        except InputError as error:
            found.append(error.reason)
            for name, value in model.named_parameters():
                assert torch.equal(value, weights[name]), name
        else:
            found.append("trained")
    loss(one, steps[0][rank]).backward()  # ranks are still in step
    return found


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("reason", ON_RANK_0)
def test_all_ranks_refuse_a_replay_that_one_of_them_cannot_run(reason: str, use_reentrant: bool) -> None:
    tables = (Table("small", 24, 8, ("f0",), sharding=("table_wise", 0)),)
    tables += (Table("large", 512, 8, ("f1",), sharding=("row_wise",)),)
    case = Case(tables, hashing=ON_RANK_0[reason], raw_ids=60, sizes=(2,))
    first, second = ranks(2).run(late, case, use_reentrant)
    assert first == second
    assert first[0] == reason
    assert first[-1] == "trained"
