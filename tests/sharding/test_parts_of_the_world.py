"""Models over a part of the ranks: state, whole tables and errors are those of the part, wherever its ranks are."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

import recfx
from recfx.collections.sharding.gather import gather_tables
from recfx.errors import CheckpointError
from tests.sharding.cases import Case
from tests.sharding.ranks import ranks
from tests.sharding.stateful import LRU, assert_same, case_of, make, sharded_of, train, whole_state

HALVES = [[0, 2], [1, 3]]


def tables_of(model: Any) -> dict[str, torch.Tensor]:
    """Whole weights, indexes and optimizer state. Collective in the group of the model."""
    found = {}
    for name, table in gather_tables(sharded_of(model)).items():
        found[f"sparse.embedding_bags.{name}.weight"] = table.weight
        found.update({f"sparse.hash_indexes.{name}.{key}": value for key, value in table.index.items()})
        assert table.optimizer is not None
        assert "params" not in table.optimizer.group
        found[f"embedding_bags.{name}.weight/{name}.momentum1"] = table.optimizer.state["sum"]
    return found


def in_halves(rank: int, world_size: int, case: Case) -> dict[str, torch.Tensor]:
    """Each half has weights of its own."""
    groups = [dist.new_group(half, timedelta(seconds=60), "gloo") for half in HALVES]
    number = rank % 2
    group = groups[number]
    model, again = make(case, 2, number, group), make(case, 2, 7, group)
    train(model, case, group.rank(), 2, 0, 3)
    sparse = sharded_of(model)
    state, optimizer = sparse.state_dict(), sparse.fused_optimizer.state_dict()
    for value in state.values():
        if isinstance(value, ShardedTensor):
            placed = {shard.placement.rank() for shard in value.metadata().shards_metadata}  # type: ignore[union-attr]
            assert placed <= set(HALVES[number])
            assert value._process_group is group
    sharded_of(again).load_state_dict(state)
    sharded_of(again).fused_optimizer.load_state_dict(optimizer)
    found = tables_of(model)
    assert_same(tables_of(again), found)
    index: Any = next(iter(sharded_of(again).hash_indexes.values()))
    if rank == 2:
        index.row_state.fill_(7)
    if number == 0:  # on both ranks of this half, while the other goes on
        with pytest.raises(CheckpointError, match="torn_state"):
            recfx.unconvert(again, with_mapping=True)
    else:
        recfx.unconvert(again, with_mapping=True)
    return found


@pytest.mark.parametrize("plan", ["mixed", "columns"])
def test_two_halves_of_the_ranks_train_models_of_their_own(plan: str) -> None:
    case = case_of(plan, LRU, "adagrad")
    found = ranks(4).run(in_halves, case)
    for number in (0, 1):
        whole = make(case, 0, number)
        train(whole, case, 0, 0, 0, 3)
        assert_same(found[number], whole_state(whole), exact=False)
        assert_same(found[number + 2], found[number])
