"""Where in a batch a part stands."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor

from recfx.pipeline.batch_paths import follow, move, path_in, tensors_in

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
