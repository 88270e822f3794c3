"""A fused step on target ``triton`` that is interrupted anywhere: every table is as before or as after."""

from __future__ import annotations

import copy
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from recfx.kernels.build import launch
from recfx.lowering.triton import lookup as triton_lookup
from tests.builders.collections import collection
from tests.builders.optimizers import attach
from tests.support.interrupts import interrupt, places


def step(model: nn.Module) -> None:
    """A step in which rows lie in one chunk of positions, and in several."""
    lengths = torch.tensor([3, 2, 4, 0, 1, 4])
    features = KeyedJaggedTensor(
        ["f1", "f2", "f3"], torch.tensor([1, 1, 2, 2, 2, *[5] * 4, 7, 5, 5, 7, 8]), lengths=lengths
    )
    model(features).values().square().sum().backward()


def state_of(model: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Weights and optimizer state of each table."""
    tensors = {}
    for name, optimizer in model.fused_optimizers().items():
        tensors[name] = [
            model.weight(name).detach().clone(),
            *(optimizer.state[key].clone() for key in sorted(optimizer.state)),
        ]
    return tensors


def trained(optimizer: str) -> nn.Module:
    """A collection of two tables, which take their steps one after the other; it has taken one already."""
    torch.manual_seed(0)
    standard = collection()
    attach(standard, optimizer)
    model = recfx.convert(standard, backend="triton")
    step(model)
    return model


def stepped(model: nn.Module, start: nn.Module, uninterrupted: nn.Module) -> list[bool]:
    """Whether each table is as after the step, and not as before it."""
    answers = []
    before, after = state_of(start), state_of(uninterrupted)
    for name, tensors in state_of(model).items():
        is_before, is_after = (all(map(torch.equal, tensors, state[name])) for state in (before, after))
        assert is_before != is_after, f"table {name}"
        answers.append(is_after)
    return answers


@pytest.mark.parametrize(("optimizer", "first"), [("sgd", 1), ("adam", 2)])
def test_a_step_is_interrupted_anywhere(optimizer: str, first: int) -> None:
    start = trained(optimizer)
    uninterrupted = copy.deepcopy(start)
    count = places(lambda: step(uninterrupted))
    for at in range(first, count + 1, 2):
        model = copy.deepcopy(start)
        interrupt(lambda model=model: step(model), at)
        stepped(model, start, uninterrupted)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_ctrl_c_comes_after_a_step_that_has_begun(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Between the kernels of a step, say, and more than once. The other table has not begun."""
    start = trained("adam")
    uninterrupted, model = copy.deepcopy(start), copy.deepcopy(start)
    step(uninterrupted)
    original, launched = launch.launch, []

    def interrupted(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.fn.__name__)
        if len(launched) == number + 2:
            for _ in range(2):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        original(kernel, *arguments, **constants)

    monkeypatch.setattr(launch, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(model)
    of_step = ["recfx_step_digits", "recfx_fused_step", "recfx_fused_step_of_borders"]
    assert launched == ["recfx_pooled_lookup"] * 2 + of_step
    assert sorted(stepped(model, start, uninterrupted)) == [False, True]


def test_an_error_in_a_step_is_raised_and_counts_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained("adam")
    before = state_of(model)

    def fail(*arguments: Any) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(triton_lookup, "fused_step_triton_", fail)
    with pytest.raises(MemoryError, match="none left"):
        step(model)
    for name, tensors in state_of(model).items():
        assert all(map(torch.equal, tensors, before[name]))
