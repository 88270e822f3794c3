"""Optimizers in backward: what is refused, what is fused, and whose the state is."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.optim import optimizers as placeholders
from torchrec.optim.keyed import KeyedOptimizer
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import recfx
from tests.builders.batches import bags
from tests.builders.collections import one_table, tables_named
from tests.builders.optimizers import attach
from tests.support.refusals import refused

ROWS, DIM = 6, 4


def collection() -> EmbeddingBagCollection:
    return one_table(["f", "g"], rows=ROWS, dim=DIM)


def batch(*ids: int) -> KeyedJaggedTensor:
    """One bag a feature; every row, if no ids are given."""
    all_ids = ids or tuple(range(ROWS))
    return bags({"f": [all_ids], "g": [all_ids[:1]]})


def train(model: nn.Module, features: KeyedJaggedTensor) -> None:
    values = model(features).values()
    (values - torch.linspace(-1, 1, values.numel()).view_as(values)).square().sum().backward()


def pair(kind: type[torch.optim.Optimizer], **how: Any) -> tuple[Any, Any]:
    """A standard collection with an optimizer in backward, in a model if that becomes a graph, and the conversion of a
    copy.
    """
    plain: Any = nn.Sequential(collection()) if how else collection()
    model = copy.deepcopy(plain)
    for one in (plain, model):
        attach(one, kind)
    return plain, recfx.convert(model, **how)


def weight_of(model: nn.Module) -> torch.Tensor:
    return next(model.parameters()).detach()


def assert_alike(plain: nn.Module, converted: nn.Module) -> None:
    torch.testing.assert_close(weight_of(converted), weight_of(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (torch.optim.SGD, "momentum", 0.9),
        (torch.optim.SGD, "maximize", True),
        (torch.optim.Adagrad, "lr_decay", 0.1),
        (RowWiseAdagrad, "maximize", True),
        (torch.optim.Adam, "amsgrad", True),
        (torch.optim.Adam, "decoupled_weight_decay", True),
    ],
)
def test_an_argument_without_a_fused_form_is_refused(
    kind: type[torch.optim.Optimizer], name: str, value: object
) -> None:
    model = collection()
    attach(model, kind)
    recfx.convert(copy.copy(model))
    next(model.parameters())._in_backward_optimizers[0].param_groups[0][name] = value
    with refused("unsupported_optimizer_argument"):
        recfx.convert(model)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.Adagrad, {"momentum1": ("sum", (ROWS, DIM))}),
        (RowWiseAdagrad, {"momentum1": ("sum", (ROWS,))}),
        (
            torch.optim.Adam,
            {"momentum1": ("exp_avg", (ROWS, DIM)), "exp_avg_sq": ("exp_avg_sq", (ROWS, DIM)), "step": ("step", (1,))},
        ),
        (
            placeholders.PartialRowWiseLAMB,
            {"momentum1": ("exp_avg", (ROWS, DIM)), "exp_avg_sq": ("exp_avg_sq", (ROWS,)), "step": ("step", (1,))},
        ),
        (placeholders.LarsSGD, {"momentum1": ("momentum_buffer", (ROWS, DIM))}),
    ],
)
def test_the_keyed_optimizer(kind: type[torch.optim.Optimizer], names: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    model = collection()
    attach(model, kind, lr=0.25)
    converted = recfx.convert(model)
    train(converted, batch(0, 1, 2))
    keyed = converted.fused_optimizer
    (table,) = recfx.explain(converted).collections[0].tables
    assert (table.kernel, table.optimizer) == ("cpu", f"fused {converted.fused_optimizers()['t'].rule.name}")
    assert isinstance(keyed, KeyedOptimizer)
    assert keyed.params.keys() == {"embedding_bags.t.weight"}
    assert keyed.params["embedding_bags.t.weight"] is converted.weight("t")
    assert [group["lr"] for group in keyed.param_groups] == [0.25]
    saved = keyed.state_dict()["state"]["embedding_bags.t.weight"]
    assert saved.keys() == {f"t.{name}" for name in names}
    state = converted.fused_optimizers()["t"].state
    for name, (ours, shape) in names.items():
        tensor = saved[f"t.{name}"]
        assert tuple(tensor.shape) == shape
        assert torch.equal(tensor.view(-1), state[ours].view(-1))
        assert bool(tensor[:3].any())
        assert not bool(tensor[3:].any())


@pytest.mark.parametrize("zeroed", [True, False])
def test_an_optimizer_attached_after_conversion_is_fused_from_the_next_forward(zeroed: bool) -> None:
    """A gradient from before, not zeroed, joins its first step; no ordinary optimizer steps with it again."""
    plain = collection()
    converted = recfx.convert(copy.deepcopy(plain))
    for one in (plain, converted):
        ordinary = torch.optim.Adam(one.parameters(), lr=0.1)
        train(one, batch())
        assert next(one.parameters()).grad is not None
        if zeroed:
            one.zero_grad()
        attach(one, torch.optim.Adagrad)
        for _ in range(2):
            train(one, batch(1, 2))
            ordinary.step()
    assert converted.fused_optimizers()["t"].rule.name == "adagrad"
    assert converted.weight("t").grad is None
    assert_alike(plain, converted)


def exchange(model: nn.Module, kind: type[torch.optim.Optimizer], lr: float) -> None:
    weight: Any = next(model.parameters())
    weight._in_backward_optimizers = [kind([weight], lr=lr)]  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: exchange(model, torch.optim.SGD, 0.01),
        lambda model: exchange(model, torch.optim.Adagrad, 0.3),
        lambda model: exchange(model, torch.optim.AdamW, 0.3),
        lambda model: attach(model, torch.optim.Adagrad),
    ],
    ids=["rate", "kind", "unfused", "second"],
)
def test_an_optimizer_exchanged_or_added_after_conversion_is_followed(change: Callable[[nn.Module], None]) -> None:
    plain, converted = pair(torch.optim.SGD)
    for step in range(3):
        for one in (plain, converted):
            if step == 1:
                change(one)
            train(one, batch())
        assert_alike(plain, converted)


@pytest.mark.parametrize("late", [False, True])
def test_an_optimizer_that_several_tables_share_steps_them_all_as_before(late: bool) -> None:
    """Each table with the settings of its own group."""
    plain, model = tables_named("a", "b"), tables_named("a", "b")
    model.load_state_dict(plain.state_dict())
    features = bags({"a": [(0, 1, 1)], "b": [(2, 3)]})
    for one in (plain, model):
        attach(one, torch.optim.SGD)
    converted = recfx.convert(model) if late else model
    for one in (plain, converted):
        train(one, features)
        shared = torch.optim.SGD([{"params": [weight], "lr": 2.0**-at} for at, weight in enumerate(one.parameters())])
        for weight in one.parameters():
            weight._in_backward_optimizers[0] = shared
    converted = converted if late else recfx.convert(model)
    for one in (plain, converted):
        train(one, features)
    for expected, actual in zip(plain.parameters(), converted.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert [refusal.code for refusal in converted.not_fused.values()] == ["optimizer_not_fused"] * 2
    assert "its SGD has 2 parameters" in converted.not_fused["b"].message


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        *((kind, start) for kind in (torch.optim.Adagrad, RowWiseAdagrad) for start in (0.0, 0.5)),
        (torch.optim.Adam, None),
    ],
)
def test_a_new_id_starts_with_fresh_state(kind: type[torch.optim.Optimizer], start: float | None) -> None:
    model = collection()
    attach(model, kind, **({} if start is None else {"initial_accumulator_value": start}))
    converted = recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0))
    for _ in range(2):
        train(converted, batch(100, 200))
    fused = converted.fused_optimizers()["t"]
    (row, other_row) = converted.index("t").find(torch.tensor([100, 200])).tolist()
    kept = {spec.name: fused.state[spec.name][other_row].clone() for spec in fused.rule.states}
    assert all(bool((fused.state[name][row] != (start or 0.0)).any()) for name in kept)
    converted.index("t").erase(torch.tensor([100]))
    converted(batch(300))
    assert converted.index("t").find(torch.tensor([300])).tolist() == [row]
    for name, value in kept.items():
        assert bool((fused.state[name][row] == (start or 0.0)).all())
        assert torch.equal(fused.state[name][other_row], value)


Hook = Callable[[nn.Parameter, list[torch.Tensor]], Any]
HOOKS: dict[str, Hook] = {
    "register_hook": lambda weight, seen: weight.register_hook(lambda gradient: seen.append(gradient.clone())),
    "clips": lambda weight, seen: weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01)),
    "post_accumulate": lambda weight, seen: weight.register_post_accumulate_grad_hook(
        lambda parameter: seen.append(parameter.grad.clone())
    ),
}


def in_either_order(hook: Hook, model: nn.Module, seen: list[torch.Tensor], step: int) -> None:
    if step == 2:
        model.handle = hook(next(model.parameters()), seen)
    if step == 4:
        model.handle.remove()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("how", [{}, {"sample": (batch(),), "whole_graph": True}], ids=["", "whole graph"])
def test_a_gradient_hook_registered_and_removed_later_sees_the_gradients(
    hook: str, kind: type[torch.optim.Optimizer], how: dict[str, Any]
) -> None:
    plain, converted = pair(kind, **how)
    seen: list[list[torch.Tensor]] = [[], []]
    for step in range(6):
        for one, gradients in zip((plain, converted), seen, strict=True):
            in_either_order(HOOKS[hook], one, gradients, step)
            train(one, batch(1, 2, 5))
        assert_alike(plain, converted)
        reasons = [reason.code for reason in recfx.explain(converted).reasons]
        assert ("optimizer_not_fused" in reasons) == (step in (2, 3))
    assert len(seen[0]) == (0 if hook == "clips" else 2)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_gradient_hook_from_before_the_conversion_keeps_the_table_dense(hook: str) -> None:
    plain, seen = collection(), [[], []]  # type: ignore[var-annotated]
    model = collection()
    model.load_state_dict(plain.state_dict())
    for one, gradients in zip((plain, model), seen, strict=True):
        attach(one, torch.optim.Adagrad)
        HOOKS[hook](next(one.parameters()), gradients)
    converted = recfx.convert(model)
    assert converted.not_fused["t"].code == "optimizer_not_fused"
    assert "hook" in converted.not_fused["t"].message
    for _ in range(3):
        for one in (plain, converted):
            train(one, batch(0, 3))
    assert_alike(plain, converted)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-6)
