"""Row-wise Adagrad with FBGEMM's modes of weight decay, beside FBGEMM's own module on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

from recfx.optim.fused_params import fused_optimizer_from_params
from recfx.optim.rules import rule_of_class
from recfx.optim.rules.rowwise_adagrad import ROWWISE_ADAGRAD
from recfx.optim.rules.rowwise_adagrad_decoupled import ROWWISE_ADAGRAD_DECOUPLED, DecoupledRowWiseAdagrad
from tests.optim.rules.steps import DIM, ROWS, batch, check_against_dense, check_other_rows_stay, fused, table


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("mode", [WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE])
def test_modes_are_those_of_fbgemm(mode: WeightDecayMode, decay: float) -> None:
    """In float16: FBGEMM's float32 kernel for the CPU ignores weight decay in every mode (fbgemm-gpu-cpu 1.8.0)."""
    params: dict[str, Any] = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.3, "eps": 0.1, "weight_decay": decay,
        "weight_decay_mode": mode,
    }  # fmt: skip
    theirs: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)], weights_precision=SparseType.FP16, **params
    )
    (their_weight,) = theirs.split_embedding_weights()
    their_weight.copy_(table())
    weight, ours = table().half(), fused_optimizer_from_params(params)
    ours.prepare(weight)
    for step, touched in enumerate(([0, 1, 2, 3, 4, 5, 6], [1, 4], [0, 4, 6])):
        rows, gradient = batch(step, torch.tensor(touched))
        theirs(rows, torch.arange(rows.numel() + 1)).backward(gradient)
        ours.step(weight, rows, gradient)
        torch.testing.assert_close(weight, their_weight, rtol=2e-3, atol=2e-3)  # each step rounds
    ((their_sum,),) = theirs.split_optimizer_states()
    torch.testing.assert_close(ours.named_state()["momentum1"], their_sum, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "settings", [{"lr": 0.3}, {"lr": 0.3, "weight_decay": 0.2}, {"lr": 0.3, "initial_accumulator_value": 0.5}]
)
def test_steps(settings: dict[str, Any]) -> None:
    check_other_rows_stay(ROWWISE_ADAGRAD_DECOUPLED, settings)
    check_against_dense(ROWWISE_ADAGRAD_DECOUPLED, settings)


def test_what_stands_for_it() -> None:
    """FBGEMM's type stands for row-wise Adagrad; the mode makes it this rule."""
    assert rule_of_class(DecoupledRowWiseAdagrad) is ROWWISE_ADAGRAD_DECOUPLED
    assert ROWWISE_ADAGRAD.variants == {WeightDecayMode.DECOUPLE: ROWWISE_ADAGRAD_DECOUPLED}


def test_its_state_is_that_of_rowwise_adagrad() -> None:
    ours = fused(ROWWISE_ADAGRAD_DECOUPLED, {"lr": 0.3, "initial_accumulator_value": 0.5}, table())
    assert torch.equal(ours.state["sum"], torch.full((ROWS, 1), 0.5))
    assert ROWWISE_ADAGRAD_DECOUPLED.states == ROWWISE_ADAGRAD.states
