"""Row-wise Adagrad: the reference step beside TorchRec's, and one number per row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from recfx.optim.rules import rule_of_class, rule_of_type
from recfx.optim.rules.rowwise_adagrad import ROWWISE_ADAGRAD
from tests.optim.rules.steps import ROWS, check_against_dense, check_other_rows_stay, fused, table


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.3},
        {"lr": 0.3, "eps": 0.1},
        {"lr": 0.3, "weight_decay": 0.2},
        {"lr": 0.3, "initial_accumulator_value": 0.5},
    ],
)
def test_steps(settings: dict[str, Any]) -> None:
    check_against_dense(ROWWISE_ADAGRAD, settings)
    check_other_rows_stay(ROWWISE_ADAGRAD, settings)


def test_what_stands_for_it() -> None:
    assert rule_of_class(RowWiseAdagrad) is ROWWISE_ADAGRAD
    for each in (EmbOptimType.ROWWISE_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
        assert rule_of_type(each) is ROWWISE_ADAGRAD


def test_its_state_has_one_number_per_row_saved_in_one_dimension() -> None:
    ours = fused(ROWWISE_ADAGRAD, {"lr": 0.3, "initial_accumulator_value": 0.5}, table())
    assert torch.equal(ours.state["sum"], torch.full((ROWS, 1), 0.5))
    assert {name: tuple(value.shape) for name, value in ours.named_state().items()} == {"momentum1": (ROWS,)}
    assert ours.named_state()["momentum1"].data_ptr() == ours.state["sum"].data_ptr()
