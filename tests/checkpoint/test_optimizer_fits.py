"""The state that an optimizer keeps after a step, found out on one element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

import recfx
from recfx.checkpoint.optimizer_fits import ELEMENTWISE, state_after_a_step

MATRIX = torch.ones(5, 3)


@pytest.mark.parametrize(
    ("optimizer", "settings", "names"),
    [
        (optim.Adam, {}, {"step", "exp_avg", "exp_avg_sq"}),
        (optim.Adam, {"amsgrad": True}, {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (optim.Adam, {"differentiable": True}, {"step", "exp_avg", "exp_avg_sq"}),
        (optim.Adam, {"lr": torch.tensor(0.1), "capturable": False}, {"step", "exp_avg", "exp_avg_sq"}),
        (optim.Adam, {"params": ["a"], "unknown": object()}, {"step", "exp_avg", "exp_avg_sq"}),
        (optim.SparseAdam, {}, {"step", "exp_avg", "exp_avg_sq"}),
        (optim.RMSprop, {}, {"step", "square_avg"}),
        (optim.RMSprop, {"momentum": 0.5, "centered": True}, {"step", "square_avg", "momentum_buffer", "grad_avg"}),
        (optim.Adagrad, {}, {"step", "sum"}),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_the_state(optimizer: type, settings: dict[str, Any], names: set[str], inference: bool) -> None:
    with torch.inference_mode(inference):
        state = state_after_a_step(optimizer, settings, MATRIX, "w")
    assert state.keys() == names
    for name, value in state.items():
        assert name == "step" or value.dim() == 2


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
@pytest.mark.parametrize("parameter", [torch.ones(()), torch.ones(4), torch.ones(2, 3, dtype=torch.float64)])
def test_the_number_of_dimensions_and_the_dtype(optimizer: type, parameter: torch.Tensor) -> None:
    """Of what has the parameter's shape; the rest are numbers."""
    if optimizer is optim.SparseAdam and parameter.dim() == 0:
        return
    state = state_after_a_step(optimizer, {}, parameter, "w")
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    assert {value.dim() for value in tensors} <= {0, parameter.dim()}
    averages = [value for name, value in state.items() if "avg" in name]
    assert all(value.dtype == parameter.dtype and value.numel() == 1 for value in averages)


@pytest.mark.parametrize("settings", [{"betas": "x"}, {"lr": None}, {"betas": (0.9,)}])
def test_settings_with_which_it_cannot_step(settings: dict[str, Any]) -> None:
    with pytest.raises(recfx.CheckpointError, match="an Adam cannot step with the settings that were saved") as caught:
        state_after_a_step(optim.Adam, settings, MATRIX, "layer.weight")
    assert (caught.value.reason, caught.value.module_path) == ("checkpoint_mismatch", "layer.weight")
