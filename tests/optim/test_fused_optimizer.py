"""The state of a fused optimizer: made for a table, left alone when it is ready, copied with the model."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import CheckedSettings, FusedOptimizer
from recfx.optim.in_backward import fused_optimizer_of
from recfx.optim.rules import RULES
from recfx.optim.rules.adagrad import ADAGRAD
from recfx.optim.rules.rowwise_adagrad import ROWWISE_ADAGRAD
from recfx.optim.rules.rule import Rule
from recfx.optim.rules.sgd import SGD
from recfx.runtime.lookup import Lookup
from tests.builders.batches import bags
from tests.builders.collections import one_table, tables_named
from tests.builders.optimizers import attach
from tests.support.refusals import refused

ROWS, DIM = 6, 4
GROUP = {"lr": 0.5, "eps": 0.1, "betas": (0.5, 0.75), "weight_decay": 0.0, "initial_accumulator_value": 0.25}
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
copied = pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ids=["deepcopy", "pickle"]
)


def fused_of(rule: Rule, dtype: torch.dtype = torch.float32) -> tuple[FusedOptimizer, Any, nn.Parameter]:
    """The fused form of an optimizer that has stepped once, that optimizer, and its table."""
    weight = nn.Parameter(torch.ones(ROWS, DIM, dtype=dtype))
    attach([weight], rule.dense_class, lr=0.5)
    (weight * torch.arange(1, DIM + 1)).sum().backward()
    fused = fused_optimizer_of(weight, "t")
    assert isinstance(fused, FusedOptimizer)
    (optimizer,) = attached_optimizers(weight)
    return fused, optimizer, weight


def train(model: nn.Module) -> None:
    (model(bags({"f": [tuple(range(ROWS))]})).values() - 2).square().sum().backward()


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_state_is_float32_on_the_tables_device_whatever_the_defaults_are(rule: Rule, dtype: torch.dtype) -> None:
    made, weight = FusedOptimizer(rule, dict(GROUP)), torch.ones(ROWS, DIM, dtype=dtype)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            made.prepare(weight)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {name: (value.dtype, value.device.type) for name, value in made.state.items()} == dict.fromkeys(
        rule.tensor_names, (torch.float32, "cpu")
    )
    assert float(made.state.get("step", 0.0)) == 0.0


@every_rule
def test_ready_state_is_left_alone(rule: Rule) -> None:
    """A learning rate schedule, a checkpoint of the optimizer: everybody has the same tensors in the same dict."""
    fused, optimizer, weight = fused_of(rule)
    before = dict(optimizer.state[weight])
    fused.prepare(weight)
    assert fused.state is optimizer.state[weight]
    assert fused.state.keys() == before.keys()
    assert all(fused.state[name] is value for name, value in before.items())


def test_state_goes_with_the_table_to_meta_and_starts_afresh_when_it_comes_back() -> None:
    fused = FusedOptimizer(ADAGRAD, dict(GROUP), {"sum": torch.full((ROWS, DIM), 3.0), "step": torch.tensor(2.0)})
    fused.prepare(torch.ones(ROWS, DIM, device="meta"))
    assert (fused.state["sum"].is_meta, fused.state["sum"].shape) == (True, (ROWS, DIM))
    fused.reset_rows(torch.tensor([1]))
    assert fused.state["sum"].is_meta
    fused.prepare(torch.ones(ROWS, DIM))
    assert torch.equal(fused.state["sum"], torch.full((ROWS, DIM), 0.25))


@pytest.mark.parametrize("rows", [ROWS - 1, ROWS + 1])
def test_state_of_other_rows_is_refused(rows: int) -> None:
    state = {"sum": torch.ones(rows, 1), "step": torch.tensor(2.0)}
    fused = FusedOptimizer(ROWWISE_ADAGRAD, dict(GROUP), state)
    with refused("optimizer_state_shape"):
        fused.prepare(torch.ones(ROWS, DIM))


@copied
def test_a_copy_of_a_copy_trains_as_the_original_does(copied: Callable[[Any], Any]) -> None:
    model = one_table(rows=ROWS)
    attach(model, "adam", lr=torch.tensor(0.1), foreach=False)
    converted: Any = recfx.convert(model)
    train(converted)
    last = copied(copied(converted))
    keyed = last.fused_optimizer
    assert keyed.param_groups[0]["params"][0] is last.weight("t")
    assert keyed.state_dict()["state"].keys() == {"embedding_bags.t.weight"}
    attached_optimizers(converted.weight("t"))[0].param_groups[0]["lr"].fill_(0.4)
    keyed.param_groups[0]["lr"].fill_(0.4)
    for module in (converted, last):
        train(module)
    assert torch.equal(last.weight("t"), converted.weight("t"))


@pytest.mark.parametrize("via_meta", [False, True])
def test_a_copy_that_is_emptied_names_its_new_parameter(via_meta: bool) -> None:
    model = one_table(rows=ROWS)
    attach(model, "adagrad")
    converted = recfx.convert(model)
    train(converted)
    emptied: Any = copy.deepcopy(converted)
    if via_meta:
        emptied.to("meta")
        assert emptied.fused_optimizer.state_dict()["state"]["embedding_bags.t.weight"]["t.momentum1"].is_meta
    emptied.to_empty(device="cpu")
    emptied.weight("t").data.fill_(1.0)
    keyed = emptied.fused_optimizer
    assert keyed.param_groups[0]["params"][0] is emptied.weight("t")
    assert not keyed.state_dict()["state"]["embedding_bags.t.weight"]["t.momentum1"].is_meta
    train(emptied)
    assert not bool((emptied.weight("t") == 1.0).any())


@pytest.mark.parametrize(("rates", "calls"), [((0.5, 0.5), 1), ((0.5, 0.25), 2)])
def test_tables_with_equal_learning_rate_tensors_share_a_call(rates: tuple[float, float], calls: int) -> None:
    model = tables_named("a", "b")
    for parameter, rate in zip(model.parameters(), rates, strict=True):
        attach([parameter], "sgd", lr=torch.tensor(rate))
    converted = recfx.convert(model)
    assert sum(isinstance(module, Lookup) for module in converted.modules()) == calls


@pytest.mark.parametrize("gone", ["", "weight_decay", "dampening"])
@pytest.mark.parametrize("value", [0.9, torch.tensor(0.9)])
def test_a_refused_setting_is_found_whenever_it_comes(gone: str, value: Any) -> None:
    """Also if it is one more, or one takes the place of another."""
    settings, checked = {"lr": 0.1, "weight_decay": 0.0, "dampening": 0}, CheckedSettings()
    one, other = (FusedOptimizer(SGD, dict(settings)) for _ in range(2))
    for rate in (0.1, 0.2):
        other.group["lr"] = rate
        assert checked.changed([one, other]) == checked.changed([one, other]) == []
    other.group.pop(gone, None)
    other.group["momentum"] = value
    assert checked.changed([one, other]) == [(1, f"momentum={value!r}")]
    assert checked.changed([other, one]) == [(0, f"momentum={value!r}")]
    del other.group["momentum"]
    assert checked.changed([one, other]) == []
