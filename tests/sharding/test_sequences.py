"""What sharded sequence collections return and save, beside the unsharded standard one on the same samples."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed.types import LazyAwaitable

import recfx
from tests.sharding.cases import Case, as_sequence, batches, build, shard, shard_converted, values_of
from tests.sharding.pipelined import CPU, PIPELINES
from tests.sharding.ranks import on_ranks, ranks
from tests.sharding.stateful import gather
from tests.sharding.typical_cases import MIXED
from tests.support.jagged import assert_same
from tests.support.pairwise import pairwise

CASE = as_sequence(Case(MIXED))


def made(world_size: int, dedup: Any = "auto") -> tuple[EmbeddingCollection, Any]:
    """The standard collection with ids in its output, and the same, sharded."""
    torch.manual_seed(0)
    standard = EmbeddingCollection([table.sequence_config() for table in CASE.tables], need_indices=True)
    converted: Any = recfx.convert(standard, hashing=None, dedup=dedup)
    return standard, shard_converted(CASE, converted, world_size)


def returned(rank: int, world_size: int, sizes: tuple[int, ...], has_ids: bool, dedup: Any) -> None:
    standard, sharded = made(world_size, dedup)
    features = batches(replace(CASE, sizes=sizes), world_size, 1)[0][rank]
    if rank == 0 and not has_ids:
        features = KeyedJaggedTensor(
            features.keys(), features.values()[:0], lengths=torch.zeros_like(features.lengths())
        )
    if features.stride():
        assert_same(sharded(features), standard(features))
        return
    for jagged in sharded(features).values():  # the standard collection raises an IndexError
        assert jagged.values().shape == (0, CASE.tables[0].dim)
        assert jagged.lengths().numel() == 0


DEDUP: list[Any] = [False, True, {"a": True, "d": True}]
SENT = pytest.mark.parametrize("dedup", DEDUP, ids=["all", "once", "some once"])


@pairwise(world_size=[1, 2, 4], sizes=[(3,), (4, 1), (2, 0)], has_ids=[True, False], dedup=DEDUP)
def test_outputs_are_those_of_the_standard_collection(
    world_size: int, sizes: tuple[int, ...], has_ids: bool, dedup: Any
) -> None:
    ranks(world_size).run(returned, sizes, has_ids, dedup)


@on_ranks(2)
def test_a_key_that_some_ranks_leave_out_has_gradients_of_zero_there(rank: int, world_size: int) -> None:
    states = []
    for leaves_out in (True, False):
        sparse = shard(CASE, build(CASE)[0], world_size)
        output = sparse(batches(CASE, world_size, 1)[0][rank])
        loss = output["f0@a"].values().sum()
        if rank == 0 or not leaves_out:
            loss = loss + output["f2"].values().sum() * (rank == 0)
        loss.backward()
        states.append({name: gather(value) for name, value in sparse.state_dict().items()})
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name


class Returned(nn.Module):
    """A loss, and the output of the collection as it is."""

    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse, self.scale = sparse, nn.Parameter(torch.ones(1))

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, Any]:
        output = self.sparse(features)
        return (values_of(output) * self.scale).sum(), output


@SENT
@pytest.mark.parametrize("pipeline", ["base", "sparse_dist", "recfx"])
@on_ranks(2)
def test_pipelines_return_what_belongs_to_each_batch(rank: int, world_size: int, pipeline: str, dedup: Any) -> None:
    """Batches of several sizes: those that are under way at the same time keep their own lengths and ids."""
    standard, sharded = made(world_size, dedup)
    model = Returned(sharded).eval()
    driver = PIPELINES[pipeline](model, torch.optim.SGD([model.scale], lr=0.1), CPU)
    mine = [batches(replace(CASE, sizes=(size, 2), seed=size), world_size, 1)[0][rank] for size in (3, 1, 5, 2)]
    source = iter(mine)
    for features in mine:
        answer: Any = driver.progress(source)
        assert isinstance(answer, LazyAwaitable)
        assert_same(answer, standard(features))
