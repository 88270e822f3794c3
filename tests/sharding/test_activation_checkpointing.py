"""Activation checkpointing of sharded collections: trained as others are, or refused by all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import recfx
from recfx.errors import InputError
from tests.sharding.cases import Case, Table, as_sequence, batches, build, shard, values_of
from tests.sharding.ranks import ranks
from tests.sharding.stateful import make, sharded_of
from tests.sharding.typical_cases import TYPES
from tests.support.pairwise import pairwise


def train(
    rank: int, world_size: int, case: Case, use_reentrant: bool | None, is_alone: bool = False
) -> list[torch.Tensor]:
    """Two batches forwarded, then both backwarded; what that leaves on this rank. The optimizer is outside.

    With ``is_alone``, only the collection is checkpointed: torch stops its second forward as soon as it can.
    """
    standard, width = build(case)
    model: Any = shard(case, standard, world_size)
    scale = torch.ones(width, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    both = iter(batches(case, world_size, 6))
    for first, second in zip(both, both, strict=True):
        losses = []
        for batch in (first, second):

            def values(batch: Any = batch) -> torch.Tensor:
                return values_of(model(batch[rank]))

            def forward(scale: torch.Tensor, values: Any = values) -> torch.Tensor:
                return ((checkpoint(values, use_reentrant=False) if is_alone else values()) * scale).exp().sum()

            losses.append(
                forward(scale) if use_reentrant is None else checkpoint(forward, scale, use_reentrant=use_reentrant)
            )
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    left = [scale.detach()]
    for local in model.sharding.local():
        left += [model.store.weight(local.name).detach(), *model.hash_indexes[local.name].state_dict().values()]
    return [tensor.clone() for tensor in left]


@pytest.mark.parametrize(
    ("kind", "is_pooled"), [("table_wise", True), ("row_wise", False), ("row_wise", True), ("data_parallel", False)]
)
def test_checkpointed_batches_train_the_same_as_others(kind: str, is_pooled: bool) -> None:
    config = recfx.HashConfig(dense_rows=0, rows=32, buckets=2, on_full="share")
    tables = (Table("a", 11, 8, ("f0",), "SUM", TYPES[kind]), Table("b", 13, 8, ("f1", "f0"), "MEAN", TYPES[kind]))
    case = Case(tables, hashing=config, raw_ids=40, optimizer="sgd", kernel="dense", sizes=(3, 5))
    case = case if is_pooled else as_sequence(case)
    pair = ranks(2)
    expected = pair.run(train, case, None)
    for how in ((False,), (True,), (None, True)):
        for rank, tensors in enumerate(pair.run(train, case, *how)):
            assert len(tensors) == len(expected[rank])
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, expected[rank], strict=True))


def refusals(rank: int, world_size: int, case: Case, use_reentrant: bool) -> list[str]:
    """What the backwards of two checkpointed batches raise here, and of one without a checkpoint."""
    sparse, one = sharded_of(make(case, world_size)), torch.ones(1, requires_grad=True)

    def loss(one: torch.Tensor, features: Any) -> torch.Tensor:
        return (values_of(sparse(features)) * one).sum()

    reasons = []
    first, second, third = (step[rank] for step in batches(case, world_size, 3))
    for features in (first, second):
        with pytest.raises(InputError) as caught:
            checkpoint(loss, one, features, use_reentrant=use_reentrant).backward()
        reasons.append(caught.value.reason)
    loss(one, third).backward()  # ranks are still in step
    return reasons


@pairwise(
    config=[{"on_full": "evict"}, {"on_full": "share", "admit_after": 2}],
    use_reentrant=[False, True],
    is_pooled=[True, False],
)
def test_all_ranks_refuse_tables_that_evict_or_admit(
    config: dict[str, Any], use_reentrant: bool, is_pooled: bool
) -> None:
    table = Table("t", 24, 8, ("f0",), sharding=("table_wise", 0))  # rank 1 has no part of it
    case = Case((table,), hashing=recfx.HashConfig(dense_rows=0, **config), raw_ids=60, sizes=(2,))
    reasons = ranks(2).run(refusals, case if is_pooled else as_sequence(case), use_reentrant)
    assert reasons == [["activation_checkpointing"] * 2] * 2
