"""Activation checkpointing around sharded tables that admit ids: the same as without it, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import recfx
from tests.sharding.cases import Case, Table, batches, build, shard
from tests.sharding.ranks import ranks
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
