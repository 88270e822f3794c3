"""What torch keeps on a parameter about its optimizers in backward, read and set in one place."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from recfx.optim.attached import (
    attached_classes,
    attached_optimizers,
    attached_to_each,
    run_in_backward,
    set_attached,
)
from tests.builders.optimizers import attach


def test_what_is_attached_is_read_in_its_order() -> None:
    none, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    attach([two], torch.optim.SGD, lr=0.5)
    attach([two], torch.optim.Adagrad, lr=0.25)
    assert [type(optimizer) for optimizer in attached_optimizers(two)] == [torch.optim.SGD, torch.optim.Adagrad]
    assert attached_classes(two) == [(torch.optim.SGD, {"lr": 0.5}), (torch.optim.Adagrad, {"lr": 0.25})]
    assert (len(attached_optimizers(none)), attached_classes(none)) == (0, [])
    assert [len(optimizers) for optimizers in attached_to_each([none, two, none])] == [0, 2, 0]
    assert attached_to_each([two])[0] is attached_optimizers(two)


def test_what_is_set_is_where_torchrec_looks_and_steps_nothing() -> None:
    weight, optimizers = nn.Parameter(torch.ones(2)), [torch.optim.SGD([nn.Parameter(torch.ones(2))])]
    set_attached(weight, optimizers)
    assert weight._in_backward_optimizers == optimizers  # type: ignore[attr-defined]
    assert weight._in_backward_optimizers is not optimizers  # type: ignore[attr-defined]
    weight.sum().backward()
    assert torch.equal(weight.detach(), torch.ones(2))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_an_attached_optimizer_steps_whatever_the_mode_was(mode: Any, frozen: bool) -> None:
    weight = nn.Parameter(torch.ones(2), requires_grad=not frozen)
    with mode():
        run_in_backward(torch.optim.SGD, weight, {"lr": 0.5})
    assert weight.requires_grad is not frozen
    weight.requires_grad_()
    (weight * torch.tensor([1.0, 2.0])).sum().backward()
    assert weight.tolist() == [0.5, 0.0]
    assert weight.grad is None
