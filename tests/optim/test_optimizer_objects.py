"""A fused optimizer is the optimizer in backward that hangs on the parameter: what is done to either is followed."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from tests.builders.collections import one_table
from tests.builders.optimizers import OPTIMIZERS, attach
from tests.support.refusals import refused

ROWS, DIM = 6, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = one_table(rows=ROWS, dim=DIM)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(features).values()


def weight_of(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def optimizer_of(model: nn.Module) -> Any:
    (optimizer,) = weight_of(model)._in_backward_optimizers  # type: ignore[attr-defined]
    return optimizer


def batch() -> KeyedJaggedTensor:
    """Every row: a dense optimizer moves the others too."""
    return KeyedJaggedTensor(["f"], torch.tensor([*range(ROWS), 1, 1]), lengths=torch.tensor([3, 5]))


def loss(values: torch.Tensor) -> torch.Tensor:
    return (values - torch.linspace(-1, 2, values.numel()).view_as(values)).square().sum()


def train(model: nn.Module, steps: int = 2) -> None:
    for _ in range(steps):
        loss(model(batch())).backward()


def pair(optimizer: str, **how: Any) -> tuple[nn.Module, nn.Module]:
    """The same model twice, the second one converted."""
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    for one in (plain, model):
        attach(one, optimizer)
    return plain, recfx.convert(model, **how)


def assert_same(plain: nn.Module, converted: nn.Module) -> None:
    torch.testing.assert_close(weight_of(converted), weight_of(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("whole_graph", [False, True], ids=["collections", "whole_graph"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_load_state_dict_of_the_optimizer_itself(optimizer: str, whole_graph: bool) -> None:
    """It puts other objects in the place of the settings and the state."""
    plain, converted = pair(optimizer, whole_graph=whole_graph, sample=(batch(),) if whole_graph else None)
    for model in (plain, converted):
        train(model)
        saved = copy.deepcopy(optimizer_of(model).state_dict())
        train(model, 3)
        optimizer_of(model).load_state_dict(saved)
        optimizer_of(model).param_groups[0]["lr"] = 0.03
        train(model, 3)
    assert_same(plain, converted)


@pytest.mark.parametrize("whole_graph", [False, True], ids=["collections", "whole_graph"])
@pytest.mark.parametrize(
    ("optimizer", "name", "value"),
    [("sgd", "momentum", 0.9), ("sgd", "maximize", True), ("adagrad", "lr_decay", 0.1), ("adam", "amsgrad", True)],
)
def test_a_setting_without_a_fused_form_that_comes_later_is_refused(
    optimizer: str, name: str, value: object, whole_graph: bool
) -> None:
    _, converted = pair(optimizer, whole_graph=whole_graph, sample=(batch(),) if whole_graph else None)
    train(converted)
    before = weight_of(converted).detach().clone()
    optimizer_of(converted).param_groups[0][name] = value
    with refused("optimizer_setting_changed", "ebc"):
        train(converted)
    assert torch.equal(weight_of(converted), before)
    with torch.no_grad():
        converted(batch())


def _halve(optimizer: Any, *rest: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def _own_step(model: nn.Module) -> None:
    optimizer = optimizer_of(model)
    step = type(optimizer).step

    def warm_up(*args: Any) -> None:
        _halve(optimizer)
        step(optimizer)

    optimizer.step = functools.partial(warm_up)


STEP_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "before": lambda model: optimizer_of(model).register_step_pre_hook(_halve),
    "after": lambda model: optimizer_of(model).register_step_post_hook(_halve),
    "own_step": _own_step,
}


@pytest.mark.parametrize("late", [False, True], ids=["before_conversion", "after_conversion"])
@pytest.mark.parametrize("hook", STEP_HOOKS)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_hooks_on_the_step_run(optimizer: str, hook: str, late: bool) -> None:
    torch.manual_seed(0)
    plain, model = Model(), Model()
    model.load_state_dict(plain.state_dict())
    for one in (plain, model):
        attach(one, optimizer)
        if not late:
            STEP_HOOKS[hook](one)
    converted = recfx.convert(model)
    if late:
        for one in (plain, converted):
            train(one)
            STEP_HOOKS[hook](one)
    for one in (plain, converted):
        train(one, 3)
    assert_same(plain, converted)
    ebc: Any = converted.ebc
    assert (not ebc.fused_optimizers(), ebc.not_fused["t"].code) == (True, "optimizer_not_fused")


def test_a_learning_rate_schedule_is_no_hook() -> None:
    plain, converted = pair("adagrad")
    for model in (plain, converted):
        schedule = torch.optim.lr_scheduler.StepLR(optimizer_of(model), 1, 0.5)
        for _ in range(3):
            train(model)
            optimizer_of(model).step()  # torch warns of a scheduler that steps first; there is no gradient left
            schedule.step()
    assert_same(plain, converted)
    ebc: Any = converted.ebc
    assert set(ebc.fused_optimizers()) == {"t"}


@pytest.mark.parametrize(("leaf", "as_parameter"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("options", [{}, {"whole_graph": True, "sample": (batch(),)}], ids=["", "whole_graph"])
def test_functional_call_trains_nothing_and_gives_gradients(
    leaf: bool, as_parameter: bool, options: dict[str, Any]
) -> None:
    """The optimizer belongs to the parameter, not to what stands in for it."""
    plain, converted = pair("adagrad", **options)
    gradients = []
    for model in (plain, converted):
        train(model)
        start = (weight_of(model).detach() * 2).requires_grad_()
        passed = nn.Parameter(start.detach().clone()) if as_parameter else start if leaf else start * 1.5
        before = passed.detach().clone()
        loss(torch.func.functional_call(model, {"ebc.embedding_bags.t.weight": passed}, (batch(),))).backward()
        assert torch.equal(passed, before)
        gradients.append((passed if leaf else start).grad)
        train(model)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-5, atol=1e-6)
    assert_same(plain, converted)
    ebc: Any = converted.ebc
    assert set(ebc.fused_optimizers()) == {"t"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_conversion_without_autograd_is_verified_all_the_same(mode: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    for one in (plain, model):
        attach(one, "adagrad")
    with mode():
        converted = recfx.convert(model, (batch(),))
        report = recfx.verify(model, converted, (batch(),))
        copied = recfx.unconvert(copy.deepcopy(converted)) if mode is torch.no_grad else None
    assert report.ok
    assert any(check.what == "gradients" or check.what == "parameters" for check in report.checks)
    for one in (plain, converted, *([copied] if copied is not None else [])):
        train(one)
        assert_same(plain, one)
