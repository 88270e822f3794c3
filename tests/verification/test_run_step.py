"""One step of a model, figure by figure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.collections.pooled import HashEmbeddingBagCollection
from recfx.discovery.sample import Sample
from recfx.verification.run_step import Run, counted_calls, noted_lookups, run_step
from tests.builders.batches import bags
from tests.builders.collections import collection, one_table


class Scaled(nn.Module):
    """Several outputs, one of which needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.unused = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))
        self.hash_indexes = nn.Module()
        self.hash_indexes.register_buffer("counts", torch.zeros(()))

    def forward(self, dense: torch.Tensor, *, more: torch.Tensor | None = None) -> list[torch.Tensor]:
        self.calls += 1
        first = dense * self.scale
        return [dense.detach(), first, first.sum(), first[:0]] if more is None else [(first * more).sum(1)]


SAMPLE = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def weights(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """The factors of the outputs in the loss, drawn one after the other."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator) for size in sizes]


def test_outputs_gradients_and_step() -> None:
    model = Scaled()
    run = run_step(model, Sample(SAMPLE), True)
    assert list(run.outputs) == ["0", "1", "2", "3"]
    assert torch.equal(run.outputs["1"], SAMPLE * torch.tensor([1.0, 2.0]))
    matrix, number = weights((3, 2), ())
    expected = (SAMPLE * matrix).sum(dim=0) / 3 + SAMPLE.sum(dim=0) * number  # the mean of samples; a number is one
    assert run.gradients.keys() == {"scale"}
    torch.testing.assert_close(run.gradients["scale"], expected)
    torch.testing.assert_close(run.parameters["scale"], torch.tensor([1.0, 2.0]) - 0.1 * expected)
    assert torch.equal(run.parameters["unused"], torch.ones(1))
    assert not run.parameters["scale"].requires_grad
    assert {name: float(value) for name, value in run.buffers.items()} == {"calls": 1.0}


def test_gradients_of_inputs() -> None:
    more = torch.ones(3, 2)
    run = run_step(Scaled(), Sample(SAMPLE.clone(), more=more.clone().requires_grad_()), True)
    (factors,) = weights((3,))
    assert run.gradients.keys() == {"input 1", "scale"}
    expected = factors.unsqueeze(1) * SAMPLE * torch.tensor([1.0, 2.0]) / 3
    torch.testing.assert_close(run.gradients["input 1"], expected)
    assert more.grad is None


@pytest.mark.parametrize("training", [True, False])
def test_the_mode(training: bool) -> None:
    class Mode(nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.tensor(self.training)

    run = run_step(Mode().train(not training), Sample(), training)
    assert bool(run.outputs["0"]) == training
    assert run.gradients == run.parameters == run.buffers == {}


def test_outputs_that_the_step_changes_are_those_before() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self) -> Any:
            return self.weight

    run = run_step(Own(), Sample(), True)
    assert torch.equal(run.outputs["0"], torch.ones(2))
    assert not torch.equal(run.parameters["weight"], torch.ones(2))


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
