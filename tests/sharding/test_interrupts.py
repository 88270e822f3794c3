"""Sharded training that is interrupted anywhere: what is gathered afterwards has no id with another id's weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

import recfx
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.gather import gather_tables
from recfx.kernels.step.row_initialization import initial_rows, initialization_key
from recfx.runtime import out_of_step
from tests.sharding.cases import Case, Table, as_sequence, sharded_model, values_of
from tests.sharding.ranks import ranks
from tests.support.interrupts import interrupt, places

ROWS, DIM, LR = 24, 8, 2.0
OLD, GONE, BATCH = [101, -7, 2**40, 5, 6, 7], [101, -7, 2**40, 5], [201, 5, 203, 204, 205, 6]
STRIDE = 5


def case_of(on_full: Any) -> Case:
    return Case(
        (
            Table("columns", ROWS, DIM, ("f0",), "SUM", ("column_wise", 0, 0)),
            Table("rows", ROWS, DIM, ("f1",), "SUM", ("row_wise",)),
        ),
        hashing=recfx.HashConfig(dense_rows=0, on_full=on_full),
        raw_ids=12,
    )


def batch(ids: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f0", "f1"], torch.tensor(ids * 2), lengths=torch.tensor([len(ids)] * 2))


def step(collection: ShardedCollection, ids: list[int]) -> None:
    """Every id gets a gradient of ones."""
    values_of(collection(batch(ids))).sum().backward()


def check(collection: ShardedCollection, most_steps: int) -> None:
    """Every row has the initial weights of its id, less a whole number of steps."""
    for name, table in gather_tables(collection).items():
        rows = torch.nonzero(table.index["row_state"]).squeeze(1)
        rows = rows[table.index["row_state"][rows] == 1]
        ids = table.index["row_ids"][rows]
        assert ids.numel() >= 2
        spec = next(table for table in collection.tables if table.name == name)
        key = initialization_key(name, 0)
        initial = initial_rows(ids, DIM, key, spec.weight_init_min, spec.weight_init_max)
        steps = (initial - table.weight[rows]) / LR
        torch.testing.assert_close(steps, steps.round(), rtol=0.0, atol=1e-5)
        assert steps.round().min() >= 0
        assert steps.round().max() <= most_steps


def interrupted_anywhere(rank: int, world_size: int, case: Case) -> int:
    start: Any = sharded_model(case, world_size).sparse
    step(start, OLD)
    step(start, OLD)
    for index in start.hash_indexes.values():
        index.erase(torch.tensor(GONE))
    uninterrupted = copy.deepcopy(start)
    count = places(lambda: step(uninterrupted, BATCH))
    check(uninterrupted, most_steps=3)
    left = 0
    for at in range(1, count + 1, STRIDE):
        collection = copy.deepcopy(start)
        interrupt(lambda collection=collection: step(collection, BATCH), at)  # type: ignore[misc]
        out_of_step._failed.clear()
        left += any(index.has_uninitialized_rows for index in collection.hash_indexes.values())
        is_repeated = bool(at // STRIDE % 2)
        if is_repeated:
            step(collection, BATCH)
        check(collection, most_steps=3 + is_repeated)  # the last places come after the update: that step counts
    return left


@pytest.mark.parametrize("is_pooled", [True, False])
@pytest.mark.parametrize("on_full", ["error", "evict"])
def test_a_step_is_interrupted_anywhere(on_full: str, is_pooled: bool) -> None:
    case = case_of(on_full)
    (left,) = ranks(1).run(interrupted_anywhere, case if is_pooled else as_sequence(case))
    assert left > 0
