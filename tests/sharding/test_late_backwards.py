"""Backwards that come late: trained as others are, or refused by all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import recfx
from recfx.errors import InputError, OutOfStepError
from tests.sharding.cases import Case, Table, as_sequence, batches, values_of
from tests.sharding.ranks import ranks
from tests.sharding.stateful import make, sharded_of

ALONE = (  # rank 1 has no part of the table whose rows are given away
    Table("small", 24, 8, ("f0",), sharding=("table_wise", 0)),
    Table("large", 512, 8, ("f1",), sharding=("row_wise",)),
)
EVICTING = Case(ALONE, hashing=recfx.HashConfig(dense_rows=0, on_full="evict"), raw_ids=200, sizes=(2,))


def late(rank: int, world_size: int, case: Case, depth: int) -> list[str]:
    """Backwards after twelve forwards, most of which come too late: what each raises here."""
    model = make(case, world_size)
    sparse, one = sharded_of(model), torch.ones(1, requires_grad=True)
    sparse.batches_in_flight = depth

    def loss(one: torch.Tensor, features: Any) -> torch.Tensor:
        return (values_of(sparse(features)) * one).sum()

    steps, waiting, outcomes = [step[rank] for step in batches(case, world_size, 12)], [], []
    for features in steps:
        waiting.append(loss(one, features))
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
    first, second = ranks(2).run(late, case, depth)
    assert first == second
    assert first[-1 - depth :] == ["trained"] * (1 + depth)
    assert "[backward_after_eviction]" in first[0]
    assert "['small']" in first[0]


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
