"""The process groups that sharded collections make for themselves, and models over a part of the ranks."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.collections.sharding.gather import gather_tables
from recfx.errors import CheckpointError
from recfx.runtime.dist_groups import DistGroups
from tests.sharding.cases import Case, Table, check, train_sharded
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.stateful import LRU, assert_same, case_of, make, sharded_of, train, whole_state

HALVES = [[0, 2], [1, 3]]


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "undefined"])  # the last one: none was named
@on_ranks(2)
def test_a_peer_that_is_gone_is_noticed_in_new_groups_as_soon_as_in_the_whole(
    rank: int, world_size: int, backend: str
) -> None:
    whole = dist.new_group(range(world_size), timedelta(seconds=17), backend)
    groups = DistGroups.of(ShardingEnv.from_process_group(whole), local_size=world_size)
    assert groups.ids is not groups.pooled
    assert groups.ids_on_host
    assert [
        group._get_backend(torch.device("cpu")).options._timeout for group in (groups.ids, groups.intra, groups.cross)
    ] == [timedelta(seconds=17)] * 3


# Ranks that belong to different numbers of process groups


def with_a_group_of_its_own(function: object, rank: int, world_size: int, *arguments: object) -> object:
    """Rank 0 is in one group more than the others, which make theirs afterwards: torch counts groups for its names."""
    alone = dist.new_group([0], use_local_synchronization=True) if rank == 0 else None
    try:
        return function(rank, world_size, *arguments)  # type: ignore[operator]
    finally:
        dist.destroy_process_group(alone or dist.new_group([rank], use_local_synchronization=True))


def members(rank: int, world_size: int, parts: list[list[int]], local_size: int) -> object:
    """The ranks in each of this rank's groups, with one environment per part of the world."""
    groups = [dist.new_group(part, timedelta(seconds=60), "gloo") for part in parts]
    (mine,) = (group for group, part in zip(groups, parts, strict=True) if rank in part)
    # TorchRec makes a DeviceMesh in here, for which some versions of torch wait for a group of all ranks.
    environment = ShardingEnv.from_process_group(mine)
    return with_a_group_of_its_own(groups_of, rank, world_size, environment, local_size)


def groups_of(rank: int, world_size: int, environment: ShardingEnv, local_size: int) -> list[list[int]]:
    groups = DistGroups.of(environment, local_size)
    again = DistGroups.of(environment, local_size)
    assert (again.ids, again.intra, again.cross) == (groups.ids, groups.intra, groups.cross)
    answers = []
    for group in (groups.ids, groups.intra, groups.cross):
        members = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
        dist.all_gather(members, torch.tensor([rank]), group=group)
        answers.append([int(member) for member in members])
    return answers


def train_with_a_group_of_its_own(rank: int, world_size: int, case: Case) -> object:
    return with_a_group_of_its_own(train_sharded, rank, world_size, case, 2)


@pytest.mark.parametrize("sharding", [("table_row_wise", 0), ("grid_shard", 0, 1)])
def test_training_where_ranks_are_in_different_numbers_of_groups(sharding: tuple[object, ...]) -> None:
    case = Case((Table("a", 21, 256 if sharding[0] == "grid_shard" else 8, ("f0",), "MEAN", sharding),), local_size=2)
    check(case, 4, ranks(4).run(train_with_a_group_of_its_own, case), rtol=1e-4, atol=1e-5)


# Models over a part of the ranks: state, whole tables and errors are those of the part, wherever its ranks are


def tables_of(model: Any) -> dict[str, torch.Tensor]:
    """Whole weights, indexes and optimizer state. Collective in the group of the model."""
    tensors = {}
    for name, table in gather_tables(sharded_of(model)).items():
        tensors[f"sparse.embedding_bags.{name}.weight"] = table.weight
        tensors.update({f"sparse.hash_indexes.{name}.{key}": value for key, value in table.index.items()})
        assert table.optimizer is not None
        assert "params" not in table.optimizer.group
        tensors[f"embedding_bags.{name}.weight/{name}.momentum1"] = table.optimizer.state["sum"]
    return tensors


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
    tensors = tables_of(model)
    assert_same(tables_of(again), tensors)
    index: Any = next(iter(sharded_of(again).hash_indexes.values()))
    if rank == 2:
        index.row_state.fill_(7)
    if number == 0:  # on both ranks of this half, while the other goes on
        with pytest.raises(CheckpointError, match="torn_state"):
            recfx.unconvert(again, with_mapping=True)
    else:
        recfx.unconvert(again, with_mapping=True)
    return tensors


@pytest.mark.parametrize("plan", ["mixed", "columns"])
def test_two_halves_of_the_ranks_train_models_of_their_own(plan: str) -> None:
    case = case_of(plan, LRU, "adagrad")
    states = ranks(4).run(in_halves, case)
    for number in (0, 1):
        whole = make(case, 0, number)
        train(whole, case, 0, 0, 0, 3)
        assert_same(states[number], whole_state(whole), exact=False)
        assert_same(states[number + 2], states[number])
