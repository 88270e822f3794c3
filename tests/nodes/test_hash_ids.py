"""What ``hash_ids`` counts: sightings, each once."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from tests.builders.batches import bags, one_bag
from tests.builders.collections import one_table, tables_named
from tests.builders.optimizers import attach


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_replayed_by_activation_checkpointing_counts_nothing(use_reentrant: bool) -> None:
    converted = recfx.convert(one_table(), hashing=recfx.HashConfig(dense_rows=0))
    features = one_bag(70, 80, 70)
    runs = 0

    def forward(scale: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        return converted(features).values() * scale

    scale = torch.ones(1, requires_grad=True)
    checkpoint(forward, scale, use_reentrant=use_reentrant).sum().backward()
    assert runs == 2
    assert converted.index("t").counters["ids_seen"] == 3
    assert converted.index("t").counters["inserted"] == 2
    gradient = converted.weight("t").grad
    assert gradient[:3, 0].tolist() == [2.0, 1.0, 0.0]


def two_tables(**config: object) -> EmbeddingBagCollection:
    plain = tables_named("a", "b", rows=8)
    attach(plain, torch.optim.SGD)
    return recfx.convert(plain, hashing=recfx.HashConfig(dense_rows=0, **config))  # type: ignore[arg-type,return-value]


def batch(first: list[int], second: list[int]) -> KeyedJaggedTensor:
    return bags({"a": [first], "b": [second]})


@pytest.mark.parametrize("on_full", ["error", "evict"])
def test_ids_that_have_rows_are_counted_beside_new_ones(on_full: str) -> None:
    converted = two_tables(on_full=on_full)
    converted(batch([1, 2, 3], [4])).values().sum().backward()
    converted(batch([1, 9, 2, 2], [4, 4])).values().sum().backward()
    converted(batch([1], [])).values().sum().backward()
    counted = [converted.index(name).counters for name in ("a", "b")]
    assert [(each["batches"], each["ids_seen"], each["inserted"]) for each in counted] == [(3, 8, 4), (3, 3, 1)]


def test_rows_in_flight_stay_after_an_older_state_was_loaded_in_place() -> None:
    converted = two_tables(on_full="evict")
    leader, follower = converted.index("a"), converted.index("b")
    follower.follow(leader)  # as column shards of one table do
    every_id = list(range(1, 9))
    converted(batch(every_id, every_id)).values().sum().backward()
    older = {name: value.clone() for name, value in leader.state_dict().items()}
    for _ in range(5):
        converted(batch(every_id, every_id)).values().sum().backward()
    for name, value in leader.state_dict().items():  # as torch.distributed.checkpoint does
        value.copy_(older[name])
    output = converted(batch([1], [1, 2])).values().sum()
    with pytest.raises(recfx.TableFullError, match="in use"):
        converted(batch([1], list(range(101, 108))))
    output.backward()
    assert (follower.find(torch.tensor([1, 2])) >= 0).all()
