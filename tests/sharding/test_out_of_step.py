"""A batch that one collection refuses: it may be left out only if no other collection has sent its part of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv

import recfx
from recfx.sharding.collection import ShardedHashEmbeddingBagCollection, shard_collection
from tests.sharding.cases import Case, Table, build, plan_of
from tests.sharding.ranks import ranks


def collection(path: str, feature: str, world_size: int) -> ShardedHashEmbeddingBagCollection:
    case = Case((Table("a", 8, 4, (feature,)),))
    converted = recfx.convert(build(case)[0])
    assert isinstance(converted, recfx.HashEmbeddingBagCollection)
    plan = plan_of(case, converted, world_size)
    return shard_collection(converted, plan, ShardingEnv.from_process_group(dist.group.WORLD), path=path)


def refused_by(rank: int, world_size: int, refusing: str) -> list[str]:
    """Steps of two collections; one of them refuses the second batch."""
    first, second = collection("first", "f0", world_size), collection("second", "f1", world_size)
    first.collection, second.collection = "first", "second"
    right = KeyedJaggedTensor(["f0", "f1"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    missing = "f0" if refusing == "first" else "f1"
    wrong = KeyedJaggedTensor([{"f0": "f1", "f1": "f0"}[missing]], torch.tensor([1]), lengths=torch.tensor([1]))
    answers = []
    for features in (right, wrong, right):
        try:
            first(features).values()
            second(features).values()
            answers.append("")
        except recfx.RecfxError as error:
            answers.append(error.reason)
    return answers


@pytest.mark.parametrize(
    ("refusing", "answers"),
    [("first", ["", "missing_feature", ""]), ("second", ["", "missing_feature", "out_of_step"])],
)
def test_a_batch_is_left_out_or_ends_the_group(refusing: str, answers: list[str]) -> None:
    assert ranks(2).run(refused_by, refusing) == [answers] * 2
