"""Which settings of an attached optimizer its user chose, and what TorchRec's placeholders hold."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torchrec.optim import optimizers as placeholders
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import recfx
from recfx.errors import Diagnostic
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import fused_optimizer_of
from tests.builders.collections import one_table
from tests.builders.optimizers import attach
from tests.support.refusals import refused

ROWS = 6


def weight_with(kind: type[torch.optim.Optimizer], **settings: Any) -> nn.Parameter:
    weight = nn.Parameter(torch.ones(ROWS, 4))
    attach([weight], kind, **{"lr": None, **settings})
    return weight


def fused(weight: nn.Parameter) -> FusedOptimizer:
    form = fused_optimizer_of(weight, "t")
    assert isinstance(form, FusedOptimizer)
    return form


@pytest.mark.parametrize("settings", [{}, {"lr": 0.01}, {"lr": torch.tensor(0.5)}, {"eps": 1e-10, "lr": 0.5}])
def test_what_was_passed_was_chosen(settings: dict[str, Any]) -> None:
    """Even the class's own default."""
    assert fused(weight_with(torch.optim.Adagrad, **settings)).chosen == settings.keys()


def test_a_setting_that_was_changed_in_the_group_was_chosen() -> None:
    weight = weight_with(torch.optim.Adagrad, eps=0.5)
    group = attached_optimizers(weight)[0].param_groups[0]
    group["lr"], group["initial_lr"] = 0.25, 0.01  # the latter by a scheduler
    assert fused(weight).chosen == {"eps", "lr"}


@pytest.mark.parametrize(
    ("kind", "settings", "group", "chosen"),
    [
        (placeholders.SGD, {}, {"lr": 0.01, "weight_decay": 0.0}, set()),
        (
            placeholders.LarsSGD,
            {"lr": 0.5, "momentum": 0.75},
            {"lr": 0.5, "eta": 0.001, "momentum": 0.75, "weight_decay": 0.0},
            {"lr", "momentum"},
        ),
        (
            placeholders.LAMB,
            {"weight_decay": 0.5},
            {"lr": 0.01, "eps": 1e-8, "betas": (0.9, 0.999), "weight_decay": 0.5},
            {"weight_decay"},
        ),
        (placeholders.SGD, {"learning_rate": 0.5}, {"lr": 0.5, "weight_decay": 0.0}, {"lr"}),
        (placeholders.SGD, {"lr": 0.5, "momentum": 0.0}, {"lr": 0.5, "weight_decay": 0.0}, {"lr"}),
        (placeholders.Adagrad, {"eps": 1e-8}, {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.0}, {"eps"}),
        (
            placeholders.Adam,
            {"lr": 0.5, "beta2": 0.75},
            {"lr": 0.5, "eps": 1e-8, "betas": (0.9, 0.75), "weight_decay": 0.0},
            {"lr", "betas"},
        ),
        (
            placeholders.Adam,
            {"betas": (0.5, 0.75)},
            {"lr": 0.01, "eps": 1e-8, "betas": (0.5, 0.75), "weight_decay": 0.0},
            {"betas"},
        ),
    ],
)
def test_a_placeholder_holds_arguments_for_fbgemm(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], group: dict[str, Any], chosen: set[str]
) -> None:
    form = fused(weight_with(kind, **settings))
    assert (type(form), form.group, form.chosen) == (FusedOptimizer, group, chosen)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (placeholders.SGD, {"momentum": 0.9}),
        (placeholders.LAMB, {"momentum": 0.9}),
        (placeholders.Adagrad, {"max_gradient": 2.0}),
        (placeholders.Adam, {"weight_decay": 0.5}),
        (placeholders.Adam, {"lerning_rate": 0.5}),
    ],
)
def test_an_argument_of_a_placeholder_that_would_have_no_effect_is_refused(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    model = one_table(rows=ROWS)
    attach(model, kind, **settings)
    with refused("unsupported_optimizer_argument", "0"):
        recfx.convert(nn.Sequential(model))


class WithOption(torch.optim.SGD):
    """Stands for a class of torch with an argument that recfx does not know yet."""

    def __init__(self, params: Any, lr: float = 0.1, option: object = None) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["option"] = option


@pytest.mark.parametrize("value", [None, 1.0, torch.tensor(0.0)])
def test_an_argument_that_no_rule_knows_is_refused(monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    """Also at its default: nobody knows what it does."""
    monkeypatch.setattr("recfx.optim.in_backward.rule_of_class", lambda kind: recfx.optim.rules.sgd.SGD)
    refusal = fused_optimizer_of(weight_with(WithOption, option=value), "m.t")
    assert isinstance(refusal, Diagnostic)
    assert (refusal.code, refusal.path) == ("unsupported_optimizer_argument", "m.t")
    assert f"WithOption(option={value!r}) has no fused form" in refusal.message


def test_a_mode_of_weight_decay_that_only_sharded_tables_would_follow_is_refused() -> None:
    """RowWiseAdagrad takes any argument; L2 is what it does."""
    refusal = fused_optimizer_of(weight_with(RowWiseAdagrad, weight_decay_mode=WeightDecayMode.DECOUPLE), "t")
    assert isinstance(refusal, Diagnostic)
    assert refusal.code == "unsupported_optimizer_argument"
    assert "train two different models" in refusal.message
    assert fused(weight_with(RowWiseAdagrad, weight_decay_mode=WeightDecayMode.L2)).rule.name == "rowwise_adagrad"


def test_a_hook_is_reported_under_its_tables_path_and_two_optimizers_are() -> None:
    for nested in (False, True):
        hooked, twice = one_table(rows=ROWS), one_table(rows=ROWS)
        attach(hooked, "sgd")
        hooked.embedding_bags["t"].weight.register_hook(lambda gradient: gradient)
        attach(twice, "sgd")
        attach(twice, "adagrad")
        for model, code in ((hooked, "optimizer_not_fused"), (twice, "several_optimizers")):
            converted: Any = recfx.convert(nn.Sequential(model) if nested else model)
            collection = converted[0] if nested else converted
            path = "0.embedding_bags.t" if nested else "embedding_bags.t"
            assert (collection.not_fused["t"].code, collection.not_fused["t"].path) == (code, path)
            assert collection.fused_optimizers() == {}
