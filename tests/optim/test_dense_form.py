"""The way back: standard collections train on with the dense optimizer, its settings and its state."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.optim.attached import attached_optimizers
from tests.builders.batches import bags
from tests.builders.collections import one_table
from tests.builders.optimizers import OPTIMIZERS, attach

ROWS = 6
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)
every_dtype = pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-6), (torch.float64, 1e-6), (torch.bfloat16, 5e-2)], ids=str
)


def pair(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """The same standard collection twice."""
    torch.manual_seed(0)
    plain = one_table(rows=ROWS).to(dtype)
    model = copy.deepcopy(plain)
    for one in (plain, model):
        attach(one, kind)
    return plain, model


def train(model: nn.Module, steps: int = 2) -> None:
    """Batches of every row: the dense rules move the others too."""
    for _ in range(steps):
        values = model(bags({"f": [tuple(range(ROWS))]})).values()
        (values - torch.linspace(-1, 1, values.numel()).view_as(values)).square().sum().backward()


def weight_of(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def state_of(model: nn.Module) -> dict[str, Any]:
    (optimizer,) = attached_optimizers(weight_of(model))
    return optimizer.state[weight_of(model)]


def assert_same(fused: nn.Module, expected: nn.Module, near: float) -> None:
    """Weights and states, and the dtypes of both."""
    torch.testing.assert_close(weight_of(fused), weight_of(expected), rtol=near, atol=near)
    assert state_of(fused).keys() >= state_of(expected).keys()
    for name, value in state_of(expected).items():
        torch.testing.assert_close(torch.as_tensor(state_of(fused)[name]), torch.as_tensor(value), rtol=near, atol=near)


@every_dtype
@every_optimizer
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("before", [0, 1])
def test_unconverted(
    kind: str, dtype: torch.dtype, near: float, copied: Callable[[nn.Module], nn.Module], before: int
) -> None:
    """The state is in the table's dtype, in which the dense optimizer goes on; ``step`` counts as before."""
    plain, model = pair(kind, dtype)
    train(plain, before)
    train(model, before)
    converted = recfx.convert(model)
    train(plain)
    train(converted)
    back = recfx.unconvert(copied(converted))
    assert isinstance(back, nn.Module)
    assert_same(back, plain, near)
    train(plain)
    train(back)
    assert_same(back, plain, near)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@every_optimizer
def test_the_original_can_still_train_beside_a_fused_one_in_another_dtype(kind: str, dtype: torch.dtype) -> None:
    _, model = pair(kind, dtype)
    converted = recfx.convert(model)
    for one in (converted, model, converted):
        before = weight_of(model).detach().clone()
        train(one)
        assert not torch.equal(weight_of(model), before)


@every_optimizer
def test_a_copy_that_was_never_trained(kind: str) -> None:
    plain, model = pair(kind)
    back = recfx.unconvert(copy.deepcopy(recfx.convert(model)))
    assert isinstance(back, nn.Module)
    train(plain)
    train(back)
    assert_same(back, plain, 1e-6)


def test_an_optimizer_that_was_attached_to_a_copy_later_stays_as_it_is() -> None:
    _, model = pair("adagrad")
    converted = recfx.convert(model)
    train(converted)
    copied = copy.deepcopy(converted)
    attach(copied, "adagrad", lr=0.5, initial_accumulator_value=2.0)
    back = recfx.unconvert(copied)
    assert isinstance(back, nn.Module)
    assert attached_optimizers(weight_of(back))[0].param_groups[0]["lr"] == 0.5
    assert torch.equal(state_of(back)["sum"], torch.full((ROWS, 4), 2.0))
