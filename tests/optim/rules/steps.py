"""Steps of a rule beside those of the dense optimizer that it stands for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.rules.rule import Rule

ROWS, DIM = 7, 4


def table(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed))


def batch(step: int, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that a batch read, some of them twice, and their gradients; every row of the table if none are given."""
    generator = torch.Generator().manual_seed(100 + step)
    touched = torch.arange(ROWS) if rows is None else rows
    touched = torch.cat([touched, touched[: touched.numel() // 2]])
    touched = touched[torch.randperm(touched.numel(), generator=generator)]
    return touched, torch.randn(touched.numel(), DIM, generator=generator)


def fused(rule: Rule, settings: dict[str, Any], weight: torch.Tensor) -> FusedOptimizer:
    """The fused optimizer of ``weight``, with the settings that the dense class has where none are given."""
    group = rule.dense_class([nn.Parameter(weight.clone())], **settings).param_groups[0]
    made = FusedOptimizer(rule, {key: value for key, value in group.items() if key != "params"})
    made.prepare(weight)
    return made


def check_against_dense(rule: Rule, settings: dict[str, Any], steps: int = 3) -> None:
    """Three batches that read every row: weights and states are those of the dense optimizer."""
    weight, parameter = table(), nn.Parameter(table())
    ours, dense = fused(rule, settings, weight), rule.dense_class([parameter], **settings)
    for step in range(steps):
        rows, gradient = batch(step)
        ours.step(weight, rows, gradient)
        parameter.grad = torch.zeros(ROWS, DIM).index_add_(0, rows, gradient)
        dense.step()
        torch.testing.assert_close(weight, parameter.detach(), rtol=1e-5, atol=1e-6)
    state = dense.state[parameter]
    assert set(rule.tensor_names) <= {*state, "step"}
    for name in rule.tensor_names:
        expected = torch.as_tensor(state.get(name, float(steps)), dtype=torch.float32)
        torch.testing.assert_close(ours.state[name], expected.view_as(ours.state[name]), rtol=1e-5, atol=1e-6)


def check_other_rows_stay(rule: Rule, settings: dict[str, Any]) -> None:
    """A batch that reads two rows changes nothing of the others, and their state does not move."""
    weight, touched = table(), torch.tensor([1, 4])
    ours = fused(rule, settings, weight)
    ours.step(weight, *batch(0))
    before = {"weight": weight.clone(), **{spec.name: ours.state[spec.name].clone() for spec in rule.states}}
    ours.step(weight, *batch(1, touched))
    after = {"weight": weight, **{spec.name: ours.state[spec.name] for spec in rule.states}}
    for name, value in after.items():
        moved = (value != before[name]).any(dim=1)
        assert moved.nonzero().squeeze(1).tolist() == touched.tolist(), name


Formula = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], int], torch.Tensor]
"""Of one row, in float64: ``(values, gradient, state, step) -> values``; ``state`` is changed in place."""


def check_against_formula(rule: Rule, settings: dict[str, Any], formula: Formula, steps: int = 4) -> None:
    """Batches that read different rows: weights and states are those of the formula, row by row."""
    weight = table()
    ours, exact = fused(rule, settings, weight), table().double()
    states = {spec.name: torch.zeros(spec.shape(ROWS, DIM), dtype=torch.float64) for spec in rule.states}
    for step, touched in zip(range(steps), ([0, 1, 2, 3, 4, 5, 6], [1, 4], [0, 4, 6], [1, 2]), strict=True):
        rows, gradient = batch(step, torch.tensor(touched))
        ours.step(weight, rows, gradient)
        for row in touched:
            state = {name: value[row] for name, value in states.items()}
            exact[row] = formula(exact[row].clone(), gradient[rows == row].double().sum(dim=0), state, step + 1)
        torch.testing.assert_close(weight.double(), exact, rtol=1e-5, atol=1e-6)
        for name, value in states.items():
            torch.testing.assert_close(ours.state[name].double(), value, rtol=1e-5, atol=1e-6)
