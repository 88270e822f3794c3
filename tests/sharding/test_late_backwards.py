"""Backwards that come late, or run their forward again: trained as others are, or refused by all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import recfx
from recfx.errors import InputError, OutOfStepError
from tests.sharding.cases import Case, Table, as_sequence, batches, build, shard, values_of
from tests.sharding.ranks import ranks
from tests.sharding.stateful import make, sharded_of
from tests.sharding.typical_cases import TYPES


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


@pytest.mark.parametrize("is_pooled", [True, False])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_checkpointed_batches_train_the_same_as_others(kind: str, is_pooled: bool) -> None:
    config = recfx.HashConfig(dense_rows=0, rows=32, buckets=2, admit_after=2, on_full="share")
    tables = (Table("a", 11, 8, ("f0",), "SUM", TYPES[kind]), Table("b", 13, 8, ("f1", "f0"), "MEAN", TYPES[kind]))
    case = Case(tables, hashing=config, raw_ids=40, optimizer="sgd", kernel="dense", sizes=(3, 5))
    case = case if is_pooled else as_sequence(case)
    pair = ranks(2)
    expected = pair.run(train, case, None)
    for how in ((False,), (True,), (None, True)):
        for rank, tensors in enumerate(pair.run(train, case, *how)):
            assert len(tensors) == len(expected[rank])
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(tensors, expected[rank], strict=True))


ALONE = (  # rank 1 has no part of the table whose rows are given away
    Table("small", 24, 8, ("f0",), sharding=("table_wise", 0)),
    Table("large", 512, 8, ("f1",), sharding=("row_wise",)),
)
EVICTING = Case(ALONE, hashing=recfx.HashConfig(dense_rows=0, on_full="evict"), raw_ids=200, sizes=(2,))
RENEWING = recfx.HashConfig(dense_rows=0, on_full="share", admit_after=2, unseen="share")


def late(rank: int, world_size: int, case: Case, use_reentrant: bool | None, depth: int = 2) -> list[str]:
    """Backwards after twelve forwards, checkpointed or not, most of which come too late: what each raises here."""
    model = make(case, world_size)
    sparse, one = sharded_of(model), torch.ones(1, requires_grad=True)
    sparse.batches_in_flight = depth

    def loss(one: torch.Tensor, features: Any) -> torch.Tensor:
        return (values_of(sparse(features)) * one).sum()

    steps, waiting, outcomes = [step[rank] for step in batches(case, world_size, 12)], [], []
    for features in steps:
        is_plain = use_reentrant is None
        waiting.append(
            loss(one, features) if is_plain else checkpoint(loss, one, features, use_reentrant=use_reentrant)
        )
    for forward in waiting:
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        try:
            forward.backward()
        except InputError as error:
            outcomes.append(str(error))
            for name, value in model.named_parameters():
                assert torch.equal(value, weights[name]), name
        else:
            outcomes.append("trained")
    loss(one, steps[0]).backward()  # ranks are still in step
    return outcomes


@pytest.mark.parametrize("case", [EVICTING, as_sequence(EVICTING)], ids=["pooled", "sequence"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_all_ranks_refuse_a_backward_if_one_of_them_has_lost_its_rows(depth: int, case: Case) -> None:
    first, second = ranks(2).run(late, case, None, depth)
    assert first == second
    assert first[-1 - depth :] == ["trained"] * (1 + depth)
    assert "[backward_after_eviction]" in first[0]
    assert "['small']" in first[0]


@pytest.mark.parametrize("is_pooled", [True, False])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(
    ("reason", "hashing"), [("replayed_ids_evicted", EVICTING.hashing), ("replayed_rows_renewed", RENEWING)]
)
def test_all_ranks_refuse_a_replay_that_one_of_them_cannot_run(
    reason: str, hashing: recfx.HashConfig, use_reentrant: bool, is_pooled: bool
) -> None:
    case = Case(ALONE, hashing=hashing, raw_ids=60, sizes=(2,))
    first, second = ranks(2).run(late, case if is_pooled else as_sequence(case), use_reentrant)
    assert [outcome.partition("]")[0] for outcome in first] == [outcome.partition("]")[0] for outcome in second]
    assert first[0].startswith(f"[{reason}]")
    assert first[-1] == "trained"


def different_depths(rank: int, world_size: int) -> str:
    sparse = sharded_of(make(EVICTING, world_size))
    sparse.batches_in_flight = 2 + rank
    with pytest.raises(OutOfStepError) as caught:
        sparse(batches(EVICTING, world_size, 1)[0][rank]).values()
    sparse.batches_in_flight = 3
    sparse(batches(EVICTING, world_size, 1)[0][rank]).values()
    return str(caught.value)


def test_ranks_that_differ_in_batches_in_flight_are_told() -> None:
    messages = ranks(2).run(different_depths)
    assert "rank 1 calls the collection of feature 'f0' with batches_in_flight=3" in messages[1]
    for message in messages:
        assert "with the same batches_in_flight" in message
