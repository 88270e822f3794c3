"""What sharded sequence collections return, beside the unsharded standard one on the same samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed.types import LazyAwaitable, ShardingEnv

import recfx
from recfx.collections.sharding.collection import shard_collection
from tests.sharding.cases import Case, as_sequence, batches, plan_of
from tests.sharding.ranks import ranks
from tests.sharding.typical_cases import MIXED

CASE = as_sequence(Case(MIXED))


def made(world_size: int) -> tuple[EmbeddingCollection, Any]:
    """The standard collection with ids in its output, and the same, sharded."""
    torch.manual_seed(0)
    standard = EmbeddingCollection([table.sequence_config() for table in CASE.tables], need_indices=True)
    converted: Any = recfx.convert(standard, hashing=None)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return standard, shard_collection(converted, plan_of(CASE, converted, world_size), env)


def assert_same_output(actual: Any, standard: EmbeddingCollection, features: KeyedJaggedTensor) -> None:
    assert isinstance(actual, LazyAwaitable)
    expected = standard(features)
    assert list(actual.keys()) == list(expected)
    for key, jagged in expected.items():
        for part in ("values", "lengths", "weights"):
            assert torch.equal(getattr(actual[key], part)(), getattr(jagged, part)()), (key, part)


def returned(rank: int, world_size: int, sizes: tuple[int, ...], has_ids: bool) -> None:
    standard, sharded = made(world_size)
    features = batches(replace(CASE, sizes=sizes), world_size, 1)[0][rank]
    if rank == 0 and not has_ids:
        features = KeyedJaggedTensor(
            features.keys(), features.values()[:0], lengths=torch.zeros_like(features.lengths())
        )
    if features.stride():
        assert_same_output(sharded(features), standard, features)
        return
    for jagged in sharded(features).values():  # the standard collection raises an IndexError
        assert jagged.values().shape == (0, CASE.tables[0].dim)
        assert jagged.lengths().numel() == 0


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize("sizes", [(3,), (4, 1), (2, 0)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_outputs_are_those_of_the_standard_collection(world_size: int, sizes: tuple[int, ...], has_ids: bool) -> None:
    ranks(world_size).run(returned, sizes, has_ids)
