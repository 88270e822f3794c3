"""Adam: the reference step beside ``torch.optim.Adam``, and the table's count of steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.optim.optimizers import Adam as TorchRecAdam

from recfx.optim.rules import rule_of_class, rule_of_type
from recfx.optim.rules.adam import ADAM
from tests.optim.rules.steps import DIM, ROWS, batch, check_against_dense, check_other_rows_stay, fused, table


@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.3}, {"lr": 0.3, "eps": 0.1}, {"lr": 0.3, "weight_decay": 0.2}, {"lr": 0.3, "betas": (0.5, 0.75)}],
)
def test_steps(settings: dict[str, Any]) -> None:
    check_against_dense(ADAM, settings)
    check_other_rows_stay(ADAM, settings)


def test_what_stands_for_it() -> None:
    assert [rule_of_class(each) for each in (torch.optim.Adam, TorchRecAdam)] == [ADAM, ADAM]
    assert rule_of_type(EmbOptimType.ADAM) is ADAM
    assert rule_of_class(torch.optim.AdamW) is None


def test_a_row_that_comes_late_is_corrected_by_the_tables_count() -> None:
    """As dense Adam corrects a row that had gradients of zero until then."""
    weight, parameter, late = table(), nn.Parameter(table()), torch.tensor([5])
    ours, dense = fused(ADAM, {"lr": 0.3}, weight), torch.optim.Adam([parameter], lr=0.3)
    for step, touched in enumerate((torch.arange(5), torch.arange(5), late)):
        rows, gradient = batch(step, touched)
        ours.step(weight, rows, gradient)
        parameter.grad = torch.zeros(ROWS, DIM).index_add_(0, rows, gradient)
        dense.step()
    torch.testing.assert_close(weight[5], parameter[5].detach(), rtol=1e-5, atol=1e-6)
    assert ours.state["step"] == 3.0


def test_its_state_is_saved_with_the_count() -> None:
    ours = fused(ADAM, {"lr": 0.3}, table())
    shapes = {name: tuple(value.shape) for name, value in ours.named_state().items()}
    assert shapes == {"momentum1": (ROWS, DIM), "exp_avg_sq": (ROWS, DIM), "step": (1,)}
    assert ours.starts() == {"momentum1": 0.0, "exp_avg_sq": 0.0, "step": 0.0}


def test_it_never_is_the_dense_rule() -> None:
    assert ADAM.unlike_dense({"lr": 1.0}) == "Adam"
