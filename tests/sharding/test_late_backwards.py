"""Backwards that come after other ids have got their rows."""

from __future__ import annotations

import pytest

import recfx
from recfx.errors import InputError, OutOfStepError
from tests.sharding.cases import Case, Table, batches
from tests.sharding.ranks import ranks
from tests.sharding.stateful import make, sharded_of

ALONE = (  # rank 1 has no part of the table whose rows are given away
    Table("small", 24, 8, ("f0",), sharding=("table_wise", 0)),
    Table("large", 512, 8, ("f1",), sharding=("row_wise",)),
)
EVICTING = Case(ALONE, hashing=recfx.HashConfig(dense_rows=0, on_full="evict"), raw_ids=200, sizes=(2,))


def late(rank: int, world_size: int) -> tuple[str, str]:
    """What a backward raises after its rows have gone to other ids, and what the next call raises then."""
    sparse = sharded_of(make(EVICTING, world_size))
    sparse.batches_in_flight = 0
    first, *others = [step[rank] for step in batches(EVICTING, world_size, 12)]
    loss = sparse(first).values().sum()
    for features in others:
        sparse(features).values()
    raised = ["", ""]
    try:
        loss.backward()
    except InputError as error:
        raised[0] = error.reason
        with pytest.raises(OutOfStepError) as after:
            sparse(first)
        raised[1] = after.value.reason
    return raised[0], raised[1]


def test_a_rank_refuses_a_backward_if_it_has_lost_the_rows_and_sends_nothing_more() -> None:
    assert ranks(2).run(late) == [("backward_after_eviction", "out_of_step"), ("", "")]


def different_depths(rank: int, world_size: int) -> str:
    sparse = sharded_of(make(EVICTING, world_size))
    sparse.batches_in_flight = 2 + rank
    with pytest.raises(OutOfStepError) as caught:
        sparse(batches(EVICTING, world_size, 1)[0][rank]).values()
    sparse.batches_in_flight = 3
    sparse(batches(EVICTING, world_size, 1)[0][rank]).values()
    return caught.value.reason


def test_ranks_that_differ_in_batches_in_flight_are_told() -> None:
    assert ranks(2).run(different_depths) == ["ranks_at_different_calls"] * 2
