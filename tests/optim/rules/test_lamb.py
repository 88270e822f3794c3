"""LAMB: the reference step beside the formula in float64, and steps without a direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.optimizers import LAMB as TorchRecLAMB

from recfx.optim.rules import rule_of_class, rule_of_type
from recfx.optim.rules.lamb import LAMB, Lamb
from tests.optim.rules.steps import (
    DIM,
    ROWS,
    check_against_dense,
    check_against_formula,
    check_other_rows_stay,
    fused,
    table,
)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.3},
        {"lr": 0.3, "eps": 0.1},
        {"lr": 0.3, "weight_decay": 0.2},
        {"lr": 0.3, "betas": (0.5, 0.75), "weight_decay": 0.1},
    ],
)
def test_steps(settings: dict[str, Any]) -> None:
    """As FBGEMM documents them."""
    rate, (beta1, beta2) = settings["lr"], settings.get("betas", (0.9, 0.999))
    eps, decay = settings.get("eps", 1e-8), settings.get("weight_decay", 0.0)

    def formula(
        values: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], step: int
    ) -> torch.Tensor:
        first = state["exp_avg"].mul_(beta1).add_((1 - beta1) * gradient)
        second = state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * gradient.square())
        adam = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + eps)
        wanted = adam + decay * values
        return values - rate * values.norm() / wanted.norm() * wanted

    check_against_formula(LAMB, settings, formula)
    check_other_rows_stay(LAMB, settings)
    check_against_dense(LAMB, settings)


def test_what_stands_for_it() -> None:
    assert [rule_of_class(each) for each in (Lamb, TorchRecLAMB)] == [LAMB, LAMB]
    assert rule_of_type(EmbOptimType.LAMB) is LAMB


def test_its_state() -> None:
    ours = fused(LAMB, {"lr": 0.3}, table())
    assert {name: tuple(value.shape) for name, value in ours.named_state().items()} == {
        "momentum1": (ROWS, DIM),
        "exp_avg_sq": (ROWS, DIM),
        "step": (1,),
    }


def test_a_step_of_zeros_changes_nothing() -> None:
    """FBGEMM divides zero by zero then."""
    weight = table()
    ours = fused(LAMB, {"lr": 0.3}, weight)
    ours.step(weight, torch.arange(ROWS), torch.zeros(ROWS, DIM))
    assert torch.equal(weight, table())
