"""What is noted of the collections of a model: calls, outputs, and the rows that were read."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.collections.pooled import HashEmbeddingBagCollection
from recfx.verification.run_step import Run, counted_calls, noted_lookups
from tests.builders.batches import bags
from tests.builders.collections import collection, one_table


class Two(nn.Module):
    """A layer and two collections, of which the second is called as often as one says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.empty = EmbeddingBagCollection([])
        self.first = one_table(["f1", "f2"])
        self.second = collection()
        self.times = 1

    def forward(self, features: KeyedJaggedTensor) -> None:
        self.first(features)
        for _ in range(self.times):
            self.second(features)


FEATURES = bags({"f1": [[1, 2], [5]], "f2": [[2], []], "f3": [[7], [7]]})


def counted(model: nn.Module, call: nn.Module, originals: dict[str, nn.Module] | None = None) -> Run:
    run = Run()
    with counted_calls(model, originals or {}, run):
        call(FEATURES)
    call(FEATURES)  # not counted
    return run


def test_calls_of_standard_collections() -> None:
    for times in (0, 1, 3):
        model = Two()
        model.times = times
        run = counted(model, model)
        assert run.calls == {"first": 1, "second": times}
        assert run.originals == set()


def test_calls_of_converted_collections() -> None:
    for hashing in (None, recfx.HashConfig(dense_rows=0)):
        model = recfx.convert(Two(), hashing=hashing, on_unsupported="keep")
        model.times = 2
        assert isinstance(model.first, HashEmbeddingBagCollection)
        assert {path: number for path, number in counted(model, model).calls.items() if path} == {
            "first": 1,
            "second": 2,
        }


def test_calls_of_the_original() -> None:
    model, copy = Two(), Two()
    run = counted(copy, model, {"first": model.first, "second": model.second})
    assert run.originals == {"first", "second"}
    run = counted(copy, copy, {"first": model.first, "second": model.second})
    assert run.originals == set()
    assert run.calls == {"first": 1, "second": 1}
    converted = recfx.convert(Two(), on_unsupported="keep")
    run = counted(copy, converted, {"second": converted.second})
    assert (run.originals, run.calls) == ({"second"}, {"first": 0, "second": 1})


def test_calls_of_a_table_by_itself_do_not_count() -> None:
    class Direct(Two):
        def forward(self, features: KeyedJaggedTensor) -> None:
            ids, offsets = torch.tensor([1, 2]), torch.tensor([0])
            self.first.embedding_bags["t"](ids, offsets)
            self.first.embedding_bags["t"](input=ids, offsets=offsets)
            self.first(features)
            self.first.embedding_bags["t"](ids, offsets, per_sample_weights=None)

    model = Direct()
    assert counted(model, model).calls == {"first": 1, "second": 0}


def noted(model: nn.Module) -> Run:
    run = Run()
    with noted_lookups(model, run):
        model(FEATURES)
    model(bags({"f1": [[9]], "f2": [[9]], "f3": [[9]]}))  # not noted
    return run


def test_rows_and_outputs() -> None:
    model = Two()
    run = noted(model)
    assert {name: rows.tolist() for name, rows in run.touched.items()} == {
        "first.embedding_bags.t.weight": [1, 2, 5],
        "second.embedding_bags.t1.weight": [1, 2, 5],
        "second.embedding_bags.t2.weight": [2, 7],
    }
    assert run.pooled.keys() == {
        ("first", "f1"), ("first", "f2"), ("second", "f1"), ("second", "f2"), ("second", "f3")
    }  # fmt: skip
    assert torch.equal(run.pooled["first", "f1"], model.first(FEATURES)["f1"])
    assert not run.pooled["first", "f1"].requires_grad


def test_rows_of_a_table_that_is_called_by_itself() -> None:
    class Direct(Two):
        def forward(self, features: KeyedJaggedTensor) -> None:
            bag = self.first.embedding_bags["t"]
            bag(torch.tensor([3, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32))

    assert noted(Direct()).touched["first.embedding_bags.t.weight"].tolist() == [1, 3]


def test_outputs_of_converted_collections() -> None:
    """Which rows they read nobody notes: the fused step of these is the one that is judged."""
    model = Two()
    converted = recfx.convert(model, on_unsupported="keep")
    run = noted(converted)
    assert run.touched == {}
    expected = noted(model)
    assert run.pooled.keys() == expected.pooled.keys()
    for key, value in run.pooled.items():
        torch.testing.assert_close(value, expected.pooled[key])
