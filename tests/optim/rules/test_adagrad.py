"""Adagrad: the reference step beside ``torch.optim.Adagrad``, and what it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.optimizers import Adagrad as TorchRecAdagrad

from recfx.optim.rules import rule_of_class, rule_of_type
from recfx.optim.rules.adagrad import ADAGRAD
from tests.optim.rules.steps import DIM, ROWS, check_against_dense, check_other_rows_stay, fused, table


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
    check_against_dense(ADAGRAD, settings)
    check_other_rows_stay(ADAGRAD, settings)


def test_what_stands_for_it() -> None:
    assert [rule_of_class(each) for each in (torch.optim.Adagrad, TorchRecAdagrad)] == [ADAGRAD, ADAGRAD]
    assert rule_of_type(EmbOptimType.EXACT_ADAGRAD) is ADAGRAD


def test_its_state() -> None:
    ours = fused(ADAGRAD, {"lr": 0.3, "initial_accumulator_value": 0.5}, table())
    assert torch.equal(ours.state["sum"], torch.full((ROWS, DIM), 0.5))
    assert {name: tuple(value.shape) for name, value in ours.named_state().items()} == {"momentum1": (ROWS, DIM)}
    assert ours.starts() == {"momentum1": 0.5}
    assert (ours.state["step"], ours.start("step")) == (0.0, 0.0)  # counted, but no rule reads it: not saved
    ours.state["sum"].fill_(3.0)
    ours.reset_rows(torch.tensor([2]))
    assert ours.state["sum"][:, 0].tolist() == [3.0, 3.0, 0.5, 3.0, 3.0, 3.0, 3.0]
