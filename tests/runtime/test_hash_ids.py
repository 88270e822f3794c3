"""What ``hash_ids`` counts: sightings, each once."""

from typing import Any

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
    assert [(counts["batches"], counts["ids_seen"], counts["inserted"]) for counts in counted] == [(3, 8, 4), (3, 3, 1)]


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


def table_of_two_rows(**config: Any) -> Any:
    torch.manual_seed(0)
    plain = one_table(rows=2)
    attach(plain, "sgd")
    return recfx.convert(plain, hashing=recfx.HashConfig(dense_rows=0, **config))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("unseen", ["zeros", "share"])
def test_a_replay_answers_the_ids_of_a_full_table_as_the_first_time(unseen: str, use_reentrant: bool) -> None:
    config = {"on_full": "share", "unseen": unseen}
    model, plain = table_of_two_rows(**config), table_of_two_rows(**config)
    for ids in ([1, 1, 1], [2, 2, 2], [3, 1, 4], [3, 2, 4, 4], [3, 3, 4, 1], [4, 3, 3, 2]):
        scale = torch.ones(1, requires_grad=True)
        again = checkpoint(
            lambda scale, ids=ids: model(one_bag(*ids)).values() * scale, scale, use_reentrant=use_reentrant
        )
        once = plain(one_bag(*ids)).values() * torch.ones(1)
        assert torch.equal(again, once)
        again.sum().backward()
        once.sum().backward()
        torch.testing.assert_close(scale.grad, once.detach().sum().view(1))
        torch.testing.assert_close(model.weight("t"), plain.weight("t"))
    assert model.index("t").counters == plain.index("t").counters


@pytest.mark.parametrize("unseen", ["zeros", "share"])
def test_in_eval_mode_ids_with_a_row_read_their_own_beside_a_single_one_without(unseen: str) -> None:
    model = table_of_two_rows(unseen=unseen)
    model(one_bag(1, 2))
    model.weight("t").data.copy_(torch.tensor([[1.0], [10.0]]).expand(2, 4))
    model.eval()
    assert model.index("t").find(torch.tensor([1, 2])).tolist() == [0, 1]
    new = 7
    shared = float(model.weight("t").detach()[int(model.index("t").shared_rows(torch.tensor([new]))), 0])
    expected = 11.0 + (shared if unseen == "share" else 0.0)
    assert model(one_bag(1, new, 2)).values()[0, 0] == expected
    assert model(one_bag(new)).values()[0, 0] == expected - 11.0
    assert model.index("t").counters["unseen_answers"] == 2


def test_every_counter_of_batches_whose_ids_all_have_rows() -> None:
    converted = two_tables()
    converted(batch([1, 2, 3], [4])).values().sum().backward()
    before = [converted.index(name).counters for name in ("a", "b")]
    converted(batch([1, 2, 2, 3], [4, 4])).values().sum().backward()
    for name, old, seen in zip(("a", "b"), before, (4, 2), strict=True):
        expected = {**old, "batches": old["batches"] + 1, "ids_seen": old["ids_seen"] + seen}
        assert converted.index(name).counters == expected
