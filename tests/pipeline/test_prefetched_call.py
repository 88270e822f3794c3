"""Which part of a batch a collection gets, and the call that is made ahead."""

import threading
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from recfx.errors import OutOfStepError
from recfx.pipeline.background import Streams, Worker
from recfx.pipeline.batch_paths import follow, move, path_in, tensors_in
from recfx.pipeline.prefetched_call import KnownCall, StartedCall
from tests.builders.batches import one_bag
from tests.sharding.cases import Case, Table, batches, build, shard
from tests.sharding.ranks import on_ranks, ranks

CASE = Case((Table("rows", 24, 8, ("f0",), "SUM", ("row_wise",)),))


def one_rank_ahead(rank: int, world_size: int) -> tuple[str, str]:
    """The first rank sends a batch ahead, as its pipeline does; the others look theirs up, as between two steps."""
    module = shard(CASE, build(CASE)[0], world_size)
    features = batches(CASE, world_size, 1)[0][rank]
    try:
        if rank > 0:
            module.eval()(features).values()
            return "", ""
        call = KnownCall.find("", module, features, (features,), {})
        assert call is not None
        started, streams = StartedCall(call, call.arguments(features)), Streams(torch.device("cpu"))
        started.start(streams, is_last=False)
        started.send(streams, Worker())
        started.finish(streams).values()
    except OutOfStepError as error:
        return error.reason, str(error)
    return "", ""


def test_a_rank_that_looks_up_while_another_sends_ahead_is_told() -> None:
    for reason, message in ranks(2).run(one_rank_ahead):
        assert reason == "ranks_at_different_calls"
        assert "feature 'f0' in training mode ahead of its step; rank 1 calls the collection of" in message


@pytest.mark.parametrize("by_name", [False, True])
def test_what_was_prefetched_is_for_the_very_objects_of_its_batch(by_name: bool) -> None:
    def arguments(part: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((), {"features": part}) if by_name else ((part,), {})

    first, second, same = one_bag(1, 2), one_bag(3), one_bag(3)
    call = KnownCall.find("", None, first, *arguments(first))
    assert call is not None
    started = StartedCall(call, call.arguments(second))
    assert started.is_for(*arguments(second))
    assert not started.is_for(*arguments(same))
    assert not started.is_for((second,), {"features": second})
    assert not started.is_for((), {})


class NotedStreams(Streams):
    """Notes which threads choose the device."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.threads: list[int] = []

    def use_device(self) -> None:
        self.threads.append(threading.get_ident())


@on_ranks(2)
def test_the_thread_that_waits_for_ids_uses_the_device_of_the_tables(rank: int, world_size: int) -> None:
    module = shard(CASE, build(CASE)[0], world_size)
    features = batches(CASE, world_size, 1)[0][rank]
    call = KnownCall.find("", module, features, (features,), {})
    assert call is not None
    started, streams, worker = StartedCall(call, call.arguments(features)), NotedStreams(), Worker()
    started.start(streams, is_last=False)
    started.send(streams, worker)
    started.finish(streams).values()
    assert streams.threads == [worker.run(threading.get_ident).result()]


Pair = namedtuple("Pair", ["dense", "sparse"])


@dataclass
class Batch:
    dense: Any
    sparse: Any


class Slotted:
    __slots__ = "sparse"

    def __init__(self, sparse: Any) -> None:
        self.sparse = sparse


def features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))


MAKERS = {
    "itself": lambda part: part,
    "tuple": lambda part: (torch.ones(2), part),
    "named_tuple": lambda part: Pair(torch.ones(2), part),
    "list": lambda part: [part, 3],
    "dict": lambda part: {"dense": torch.ones(2), "sparse": part},
    "dataclass": lambda part: Batch(torch.ones(2), part),
    "slots": lambda part: Slotted(part),
    "nested": lambda part: {"inputs": [Batch(None, (part,))]},
}


@pytest.mark.parametrize("kind", MAKERS)
def test_finds_a_part_and_the_same_part_of_another_batch(kind: str) -> None:
    first, second = features(), features()
    path = path_in(MAKERS[kind](first), first)
    assert path is not None
    assert follow(MAKERS[kind](second), path) is second


def test_what_only_equals_a_part_is_none() -> None:
    assert path_in((features(), torch.ones(2)), features()) is None
    assert path_in(features(), torch.ones(2)) is None


def test_a_batch_that_holds_itself() -> None:
    batch: dict[str, Any] = {}
    batch["self"] = batch
    assert path_in(batch, features()) is None
    assert list(tensors_in(batch)) == []


@pytest.mark.parametrize("kind", sorted(set(MAKERS) - {"slots"}))
def test_moves_every_part(kind: str) -> None:
    moved = move(MAKERS[kind](features()), torch.device("meta"))
    parts = list(tensors_in(moved))
    assert parts
    assert {part.device().type if isinstance(part, KeyedJaggedTensor) else part.device.type for part in parts} == {
        "meta"
    }
