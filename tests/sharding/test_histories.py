"""What rows an eviction takes follows from the calls that all ranks make: see ``histories``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import recfx
from recfx.errors import InputError, OutOfStepError
from tests.sharding.cases import Case, Table, batches, concatenate
from tests.sharding.histories import PARTS, compare, history_of
from tests.sharding.ranks import ranks
from tests.sharding.stateful import assert_same, make, sharded_of, whole_state

HISTORIES = [(seed, [2, 1]) for seed in range(9)] + [(seed, [4, 2]) for seed in range(40, 43)]


@pytest.mark.parametrize(("seed", "world_sizes"), HISTORIES)
def test_the_same_calls_leave_the_same_state(seed: int, world_sizes: list[int]) -> None:
    assert compare(history_of(seed, world_sizes[0]), world_sizes) != "a table is too small"


ALONE = Case(  # rank 1 has no part of the table that evicts
    (
        Table("small", 24, 8, ("f0",), sharding=("table_wise", 0)),
        Table("large", 512, 8, ("f1",), sharding=("row_wise",)),
    ),
    hashing=recfx.HashConfig(dense_rows=0, on_full="evict"),
    raw_ids=200,
    sizes=(2,),
)


def late(rank: int, world_size: int, depth: int) -> list[str]:
    model = make(ALONE, world_size)
    sparse = sharded_of(model)
    sparse.batches_in_flight = depth
    found: list[str] = []
    losses = [sparse(step[rank]).values().sum() for step in batches(ALONE, world_size, 12)]
    for loss in losses:
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        try:
            loss.backward()
        except InputError as error:
            found.append(str(error))
            for name, value in model.named_parameters():
                assert torch.equal(value, weights[name]), name
        else:
            found.append("trained")
    sparse(batches(ALONE, world_size, 1)[0][rank]).values().sum().backward()  # ranks are still in step
    return found


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_all_ranks_refuse_a_backward_if_one_of_them_has_lost_its_rows(depth: int) -> None:
    first, second = ranks(2).run(late, depth)
    assert first == second
    assert first[-1 - depth :] == ["trained"] * (1 + depth)
    assert "[backward_after_eviction]" in first[0]
    assert "['small']" in first[0]


def kept_on_one_rank(rank: int, world_size: int, case: Case) -> dict[str, torch.Tensor]:
    model: Any = make(case, world_size)
    log = []
    for number, step in enumerate(batches(case, PARTS, 60)):
        share = PARTS // max(world_size, 1)
        loss = model.sparse(concatenate(step[rank * share : (rank + 1) * share])).values().sum() * max(world_size, 1)
        if number % 7 == 3:
            if rank == 0:
                log.append(loss)
            continue
        loss.backward()
    return whole_state(model)


@pytest.mark.parametrize("sharding", [("column_wise", 0, 1), ("row_wise",), ("data_parallel",)])
def test_losses_of_skipped_steps_that_one_rank_keeps(sharding: tuple[Any, ...]) -> None:
    case = Case(
        (Table("t", 64, 8, ("f0", "f1"), sharding=sharding),),
        optimizer="dyadic_sgd",
        hashing=recfx.HashConfig(dense_rows=0, on_full="evict", buckets=2),
        raw_ids=500,
        sizes=(1,),
    )
    expected = kept_on_one_rank(0, 0, case)
    for found in ranks(2).run(kept_on_one_rank, case):
        assert_same(found, expected)


def different_depths(rank: int, world_size: int) -> str:
    sparse = sharded_of(make(ALONE, world_size))
    sparse.batches_in_flight = 2 + rank
    with pytest.raises(OutOfStepError) as caught:
        sparse(batches(ALONE, world_size, 1)[0][rank]).values()
    sparse.batches_in_flight = 3
    sparse(batches(ALONE, world_size, 1)[0][rank]).values()
    return str(caught.value)


def test_ranks_that_differ_in_batches_in_flight_are_told() -> None:
    messages = ranks(2).run(different_depths)
    assert "rank 1 calls the collection of feature 'f0' with batches_in_flight=3" in messages[1]
    for message in messages:
        assert "with the same batches_in_flight" in message
