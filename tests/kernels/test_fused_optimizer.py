"""One step on touched rows: repeats are summed, other rows stay, and the table's dtype is rounded to once."""

from __future__ import annotations

import pytest
import torch

from recfx.kernels.step.fused_step import step_touched_rows


def subtract(values: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """A rule that keeps the sum of the gradients of each row's elements, and their number of steps."""
    state["total"].add_(gradient)
    state["steps"].add_(1)
    return values - gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_stepped_once_with_the_sum_of_their_gradients(dtype: torch.dtype) -> None:
    weight = torch.arange(8).view(4, 2).to(dtype)
    state = {"total": torch.zeros(4, 2), "steps": torch.zeros(4, 1)}
    rows, gradient = torch.tensor([3, 1, 3, 3]), torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]])
    step_touched_rows(subtract, weight, rows, gradient, state)
    assert weight.tolist() == [[0, 1], [-1, -1], [4, 5], [6 - 13, 7 - 16]]
    assert state["total"].tolist() == [[0, 0], [3, 4], [0, 0], [13, 16]]
    assert state["steps"].tolist() == [[0], [1], [0], [1]]


def test_small_gradients_are_summed_before_the_weight_is_rounded() -> None:
    weight = torch.full((2, 1), 2048.0, dtype=torch.float16)  # whose neighbour above is two away
    step_touched_rows(subtract, weight, torch.zeros(4, dtype=torch.int64), torch.full((4, 1), -0.5), _state(2))
    assert weight.tolist() == [[2050.0], [2048.0]]


def test_an_empty_batch_changes_nothing() -> None:
    weight, state = torch.ones(2, 1), _state(2)
    step_touched_rows(subtract, weight, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 1), state)
    assert (weight.tolist(), state["steps"].tolist()) == ([[1.0], [1.0]], [[0.0], [0.0]])


def _state(rows: int) -> dict[str, torch.Tensor]:
    return {"total": torch.zeros(rows, 1), "steps": torch.zeros(rows, 1)}
