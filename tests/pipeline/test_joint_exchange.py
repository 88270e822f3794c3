"""Ids of several collections in one exchange: the same bits as one exchange each, in fewer messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from recfx.errors import InputError
from tests.sharding.cases import Case, as_sequence, batches, build, shard, values_of
from tests.sharding.pipelined import CPU, PIPELINES, assert_same, what_is_left
from tests.sharding.ranks import ranks
from tests.sharding.typical_cases import MIXED, hashed_case, one_type

CASES = (
    Case(MIXED, optimizer="adagrad", sizes=(3, 0, 5, 2), seed=1),
    hashed_case("row_wise", "error", is_weighted=True, sizes=(1, 4)),
    as_sequence(hashed_case("column_wise", "error", sizes=(2, 3), seed=2)),
    one_type("data_parallel", is_weighted=True, sizes=(4, 1), seed=3),
)
"""Batch sizes differ between the collections, and between ranks; two of four have weights."""


@dataclass
class Batch:
    """Ids of each collection, and a number that each rank's dense layer takes."""

    features: list[KeyedJaggedTensor]

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self


class Several(nn.Module):
    """A collection of each case."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(shard(case, build(case)[0], world_size) for case in CASES)
        self.over = nn.Linear(1, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        features: list[Any] = [*batch.features, *[None] * (len(self.parts) - len(batch.features))]
        outputs = [part(of_part) for part, of_part in zip(self.parts, features, strict=True)]
        values = torch.cat([values_of(output).flatten() for output in outputs])
        return (values.tanh() ** 2).sum() + 0 * self.over.weight.sum(), values.detach()


def batches_of(rank: int, world_size: int, steps: int) -> list[Batch]:
    of_cases = [[step[rank] for step in batches(case, world_size, steps)] for case in CASES]
    return [Batch(list(features)) for features in zip(*of_cases, strict=True)]


def train(rank: int, world_size: int, pipeline: str) -> dict[str, Any]:
    model = Several(world_size)
    optimizer = torch.optim.SGD(model.over.parameters(), lr=0.1)
    driver, mine = PIPELINES[pipeline](model, optimizer, CPU), batches_of(rank, world_size, 5)
    source = iter(mine)
    pooled = [driver.progress(source) for _ in mine]
    return {"pooled": pooled, "left": what_is_left(model)}


@pytest.mark.parametrize("world_size", [2, 4])
def test_changes_no_bit(world_size: int) -> None:
    expected = ranks(world_size).run(train, "loop")
    actual = ranks(world_size).run(train, "recfx")
    assert_same(actual, expected)


def sent_in_one_step(rank: int, world_size: int, pipeline: str) -> list[int]:
    """How many messages of ids, which only gloo's group for ids sends: those of a forward less its rows."""
    model = Several(world_size)
    driver = PIPELINES[pipeline](model, torch.optim.SGD(model.over.parameters(), lr=0.1), CPU)
    source = iter(batches_of(rank, world_size, 4))
    driver.progress(source)  # calls are learned
    model.eval()
    group, counts = model.parts[0].groups.ids, []
    original = torch.distributed.all_to_all_single

    def noted(*arguments: Any, **keywords: Any) -> Any:
        of_group = keywords.get("group")
        counts.append(of_group is group)
        return original(*arguments, **keywords)

    with mock.patch.object(torch.distributed, "all_to_all_single", noted):
        driver.progress(source)
    return [sum(counts)]


def test_a_step_sends_three_messages_of_ids_whatever_the_number_of_collections() -> None:
    """Alone, the four collections send sizes, and lengths with ids, and two of them weights."""
    assert ranks(2).run(sent_in_one_step, "loop") == [[10], [10]]
    assert ranks(2).run(sent_in_one_step, "recfx") == [[3], [3]]


def refuse_one(rank: int, world_size: int) -> list[str]:
    """In the third batch, an id of the first collection on the last rank is not a row; the second lacks its part."""
    model = Several(world_size)
    driver = recfx.TrainPipeline(model, torch.optim.SGD(model.over.parameters(), lr=0.1), CPU)
    mine = batches_of(rank, world_size, 6)
    if rank == world_size - 1:
        keys = mine[2].features[0].keys()
        one = torch.ones(len(keys), dtype=torch.int64)
        mine[2].features[0] = KeyedJaggedTensor(keys, one * 10**6, lengths=one)
        mine[4].features = mine[4].features[:1]
    source, outcomes = iter(mine), []
    for _ in mine:
        try:
            driver.progress(source)
            outcomes.append("trained")
        except InputError as error:
            outcomes.append(error.reason)
    return outcomes


def test_a_batch_that_one_collection_refuses_is_refused_by_all_ranks_and_training_goes_on() -> None:
    first, last = ranks(2).run(refuse_one)
    refused = "refused_on_another_rank"
    assert first == ["trained", "trained", refused, "trained", refused, "trained"]
    assert last == ["trained", "trained", "id_out_of_range", "trained", "part_not_in_batch", "trained"]


def leave_one_out(rank: int, world_size: int) -> str:
    """On the last rank, one collection is kept out by a call that differs, while the others start it ahead."""
    model = Several(world_size)
    driver = recfx.TrainPipeline(model, torch.optim.SGD(model.over.parameters(), lr=0.1), CPU)
    source = iter(batches_of(rank, world_size, 6))
    driver.progress(source)
    driver.progress(source)
    if rank == world_size - 1:
        ahead = driver._ahead
        ahead._known = [call for call in ahead._known or () if call.name != "parts.1"]
    try:
        while True:
            driver.progress(source)
    except recfx.errors.OutOfStepError as error:
        return f"{error.reason}: {error.message}"


def test_ranks_that_send_other_collections_together_are_told_so() -> None:
    for answer in ranks(2).run(leave_one_out):
        assert answer.startswith("ranks_at_different_calls: ranks are at different calls: rank 0 ")
        assert "together ahead of its step" in answer
