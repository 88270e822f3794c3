"""One step of a model, figure by figure."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx.discovery.sample import Sample
from recfx.verification.run_step import Run, noted_lookups, run_step
from tests.builders.batches import bags
from tests.builders.collections import collection, one_table
from tests.support.refusals import refused


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


def test_calls_of_the_original_and_of_an_earlier_copy_are_refused() -> None:
    model, copied = Two(), Two()
    model.layer, copied.layer = nn.Identity(), nn.Identity()
    sample, originals = Sample(FEATURES), {"first": model.first, "second": model.second}
    assert run_step(copied, sample, True, originals).called == {"first", "second"}
    model(FEATURES)  # outside, it is as before
    with refused("replaced_collection_called", "first"):
        run_step(model, sample, True, originals)
    with refused("replaced_collection_called", "first"):
        copied(FEATURES)


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
