"""Optimizers of a converted model: ordinary ones step on, fused ones follow the dense rules on touched rows."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor

from recfx.conversion.convert import convert
from recfx.optim.rules.adam import PARTIAL_ROWWISE_ADAM
from recfx.optim.rules.lamb import LAMB, PARTIAL_ROWWISE_LAMB
from recfx.optim.rules.lars_sgd import LARS_SGD
from recfx.optim.rules.rowwise_adagrad import ROWWISE_ADAGRAD_DECOUPLED
from recfx.optim.rules.rule import Rule
from tests.builders.batches import batch, one_bag
from tests.builders.collections import collection, tables_named
from tests.builders.optimizers import attach
from tests.models.handwritten import Tower


def train(one: nn.Module, features: KeyedJaggedTensor) -> None:
    values = one(features).values()
    (values - torch.linspace(-1, 1, values.numel()).view_as(values)).square().sum().backward()


def assert_alike(plain: nn.Module, converted: nn.Module) -> None:
    actual, expected = converted.state_dict(), plain.state_dict()
    torch.testing.assert_close({name: actual[name] for name in expected}, dict(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam])
@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "inplace"])
def test_an_optimizer_built_before_conversion_steps_on(optimizer: type[torch.optim.Optimizer], inplace: bool) -> None:
    """Already with state; five steps beside the plain model."""
    plain = Tower()
    model = copy.deepcopy(plain)
    optimizers = [optimizer(one.parameters(), lr=0.1) for one in (plain, model)]
    converted = model
    for step in range(5):
        features = batch(6)
        if step == 2:
            converted = convert(model, inplace=inplace)
        for one, stepper in zip((plain, converted), optimizers, strict=True):
            stepper.zero_grad()
            (one(features) - 1).square().mean().backward()
            stepper.step()
    for (name, expected), (_, actual) in zip(plain.named_parameters(), converted.named_parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("backend", ["fbgemm", "reference"])
def test_fused_optimizers_of_half_precision_tables(kind: str, backend: str) -> None:
    """Against the same tables in float32; each step rounds once."""
    exact = collection()
    half = copy.deepcopy(exact).half()
    exact.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    for one in (exact, half):
        attach(one, kind)
    converted = convert(half, backend=backend)
    for _ in range(3):
        features = batch(6)
        train(exact, features)
        train(converted, features)
    for name, expected in exact.state_dict().items():
        torch.testing.assert_close(converted.state_dict()[name].float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_training_goes_on_from_plain_to_fused_and_back(kind: str) -> None:
    """The optimizer's state is one and the same: converted in the middle, and the original takes over at the end."""
    plain = collection()
    model = copy.deepcopy(plain)
    for one in (plain, model):
        attach(one, kind)
    features = batch(6)
    for _ in range(2):
        train(plain, features)
        train(model, features)
    converted = convert(model)
    for one in (converted, converted, model, model, converted):
        train(plain, features)
        train(one, features)
    assert_alike(plain, converted)


def test_one_table_fused_and_one_not() -> None:
    plain = collection()
    model = copy.deepcopy(plain)
    steppers = []
    for one in (plain, model):
        first, second = one.parameters()
        attach([first], "adagrad")
        steppers.append(torch.optim.SGD([second], lr=0.1))
    converted = convert(model)
    for _ in range(3):
        features = batch(6)
        for one, stepper in zip((plain, converted), steppers, strict=True):
            stepper.zero_grad()
            train(one, features)
            stepper.step()
    assert_alike(plain, converted)


def test_a_second_derivative_is_refused_as_by_the_standard_collection() -> None:
    """A penalty on gradients must not be dropped without a word."""
    for model in (Tower(), convert(Tower())):
        loss = model(batch(5)).square().sum()
        weight = model.ebc.embedding_bags["t1"].weight
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        penalized = gradient.square().sum() + model.linear.bias.sum()
        with pytest.raises(RuntimeError, match=r"once_differentiable|not implemented"):
            penalized.backward()


@pytest.mark.parametrize(
    "rule", [LAMB, LARS_SGD, PARTIAL_ROWWISE_ADAM, PARTIAL_ROWWISE_LAMB, ROWWISE_ADAGRAD_DECOUPLED]
)
def test_a_dense_form_steps_rows_whose_gradient_is_partly_zero(rule: Rule) -> None:
    """As the rule steps them; a row whose gradient is zero, and its state, stay as they are."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3))
    dense: Any = rule.dense_class
    optimizer = dense([weight], lr=0.5, weight_decay=0.25)
    gradient = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0], [0.0, -1.0, 0.0], [1.0, 2.0, 3.0]])
    touched = [0, 2, 3]
    state = {spec.name: torch.zeros(spec.shape(3, 3)) for spec in rule.states}
    for step in (1.0, 2.0):
        expected = weight.detach().clone()
        expected[touched] = rule.update(expected[touched], gradient[touched], state, step, optimizer.param_groups[0])
        weight.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-7)
    for name, value in state.items():
        torch.testing.assert_close(optimizer.state[weight][name][touched], value, rtol=1e-6, atol=1e-7)
        assert not optimizer.state[weight][name][1].any()


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam])
def test_what_an_optimizer_of_a_half_precision_table_saves(kind: type[torch.optim.Optimizer]) -> None:
    """Float32, which kernels need; an optimizer of a plain half-precision table takes it, and goes on."""
    optimizers = []
    for is_converted in (False, True, False):
        torch.manual_seed(0)
        model: Any = tables_named("t").half()
        apply_optimizer_in_backward(kind, model.parameters(), {"lr": 0.1})
        model = convert(model) if is_converted else model
        if len(optimizers) < 2:
            for _ in range(3):
                model(one_bag(0, 1, feature="t")).values().float().sum().backward()
        optimizers.append(model.embedding_bags["t"].weight._in_backward_optimizers[0])
    optimizers[2].load_state_dict(optimizers[1].state_dict())
    (first, fused, last) = (optimizer.state_dict()["state"][0] for optimizer in optimizers)
    assert first["step"] == last["step"] == 3
    assert {value.dtype for value in fused.values()} == {torch.float32}
    torch.testing.assert_close(last, first, rtol=1e-2, atol=1e-3)
    model(one_bag(0, 1, feature="t")).values().float().sum().backward()
    assert float(optimizers[2].state_dict()["state"][0]["step"]) == 4


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam])
def test_the_state_of_a_half_precision_table_is_live(kind: type[torch.optim.Optimizer]) -> None:
    """Reading, pickling, copying and changing it act as without recfx, up to the rounding of a half."""
    found = []
    for is_converted in (False, True):
        torch.manual_seed(0)
        model: Any = tables_named("t").half()
        apply_optimizer_in_backward(kind, model.parameters(), {"lr": 0.1, "eps": 1e-3})
        model = convert(model) if is_converted else model
        weight = model.embedding_bags["t"].weight
        (optimizer,) = weight._in_backward_optimizers
        for _ in range(3):
            model(one_bag(0, 1, feature="t")).values().float().sum().backward()
        (pickled,) = pickle.loads(pickle.dumps(optimizer)).state.values()
        (copied,) = copy.deepcopy(optimizer).state.values()
        seen = copy.deepcopy([dict(optimizer.state[weight]), pickled, copied])
        for name in optimizer.state[weight].keys() - {"step"}:
            optimizer.state[weight][name].fill_(1.0)
        model(one_bag(0, 1, feature="t")).values().float().sum().backward()
        found.append([*seen, {"weight": weight.detach()[:2].clone()}])  # fused steps leave other rows alone
    for plain, ours in zip(*found, strict=True):
        assert ours.keys() == plain.keys()
        for name, value in plain.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-2, atol=2e-3, check_dtype=False)


@pytest.mark.parametrize("form", ["transposed", "negated", "float64"])
def test_a_state_in_another_form_stays_that_of_its_optimizer(form: str) -> None:
    """Kernels cannot read it so; what they make of it is the optimizer's own state, as without recfx."""
    as_given: Callable[[torch.Tensor], torch.Tensor] = {
        "transposed": lambda state: state.t().contiguous().t(),
        "negated": lambda state: torch._neg_view(-state),
        "float64": lambda state: state.double(),
    }[form]
    states = []
    for is_converted in (False, True):
        torch.manual_seed(0)
        model: Any = tables_named("t")
        apply_optimizer_in_backward(torch.optim.Adagrad, model.parameters(), {"lr": 0.1})
        model = convert(model) if is_converted else model
        weight = model.embedding_bags["t"].weight
        state = weight._in_backward_optimizers[0].state[weight]
        for step in range(3):
            if step == 1:
                state["sum"] = as_given(state["sum"])
            model(one_bag(0, 1, feature="t")).values().sum().backward()
        states.append(state["sum"].float())
    torch.testing.assert_close(states[1], states[0])
