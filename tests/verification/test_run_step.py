"""One step of a model, figure by figure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recfx.discovery.sample import Sample
from recfx.verification.run_step import run_step


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
