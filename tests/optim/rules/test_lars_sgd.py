"""LARS-SGD: the reference step beside the formula in float64, and rows without a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.optimizers import LarsSGD as TorchRecLarsSGD

from recfx.optim.rules import rule_of_class, rule_of_type
from recfx.optim.rules.lars_sgd import LARS_SGD, LarsSgd
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
        {"lr": 3.0, "eta": 0.1},
        {"lr": 3.0, "eta": 0.1, "momentum": 0.0},
        {"lr": 3.0, "eta": 0.1, "weight_decay": 0.2},
        {"lr": 3.0},
    ],
)
def test_steps(settings: dict[str, Any]) -> None:
    """As FBGEMM documents them."""
    rate, eta = settings["lr"], settings.get("eta", 0.001)
    momentum, decay = settings.get("momentum", 0.9), settings.get("weight_decay", 0.0)

    def formula(
        values: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], step: int
    ) -> torch.Tensor:
        adjusted = rate * eta * values.norm() / (gradient.norm() + decay * values.norm())
        return values - state["momentum_buffer"].mul_(momentum).add_(adjusted * (gradient + decay * values))

    check_against_formula(LARS_SGD, settings, formula)
    check_other_rows_stay(LARS_SGD, settings)
    check_against_dense(LARS_SGD, settings)


def test_what_stands_for_it() -> None:
    assert [rule_of_class(each) for each in (LarsSgd, TorchRecLarsSGD)] == [LARS_SGD, LARS_SGD]
    assert rule_of_type(EmbOptimType.LARS_SGD) is LARS_SGD


def test_its_state() -> None:
    ours = fused(LARS_SGD, {"lr": 0.3}, table())
    assert {name: tuple(value.shape) for name, value in ours.named_state().items()} == {"momentum1": (ROWS, DIM)}


def test_a_step_of_zeros_changes_nothing() -> None:
    """FBGEMM divides zero by zero then."""
    weight = table()
    ours = fused(LARS_SGD, {"lr": 0.3}, weight)
    ours.step(weight, torch.arange(ROWS), torch.zeros(ROWS, DIM))
    assert torch.equal(weight, table())
