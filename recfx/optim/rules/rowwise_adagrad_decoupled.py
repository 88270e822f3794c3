"""Row-wise Adagrad with decoupled weight decay: ``weight_decay_mode=WeightDecayMode.DECOUPLE`` of FBGEMM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from recfx.optim.rules.rule import EPS, LEARNING_RATE, WEIGHT_DECAY, Rule, StateTensor, StepNumbers
from recfx.optim.rules.touched_rows import TouchedRowsOptimizer, TouchedRowsRule


class RowWiseAdagradDecoupled(TouchedRowsRule):
    """Row-wise Adagrad that shrinks weights by ``lr * weight_decay`` and leaves gradients as they are."""

    def update(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        step: float,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """Without weight decay, the same step as ``torchrec.optim.RowWiseAdagrad``."""
        rate, decay = float(group["lr"]), group["weight_decay"]
        total = state["sum"].add_(gradient.square().mean(dim=1, keepdim=True))
        kept = values - rate * decay * values if decay else values
        return kept - rate * gradient / (total.sqrt() + group["eps"])

    def step_numbers(self, step: float, group: Mapping[str, Any]) -> StepNumbers:
        """Weight decay is the rule's own."""
        rate = float(group["lr"])
        return StepNumbers(rate, eps=float(group["eps"]), own_decay=rate * float(group["weight_decay"]))

    def when_columns_are_cut(self, blocks: int) -> tuple[str, str]:
        """Each block of columns has its own sum."""
        return self.cut_columns("keeps one number per row, a mean over its columns, in", blocks, "Adagrad")


class DecoupledRowWiseAdagrad(TouchedRowsOptimizer):
    """The optimizer for a table that is not fused. Its defaults are FBGEMM's."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "eps": eps,
                "weight_decay": weight_decay,
                "initial_accumulator_value": initial_accumulator_value,
            },
        )

    @property
    def rule(self) -> Rule:
        """Itself."""
        return ROWWISE_ADAGRAD_DECOUPLED


ROWWISE_ADAGRAD_DECOUPLED = RowWiseAdagradDecoupled(
    name="rowwise_adagrad_decoupled",
    label="row-wise Adagrad with decoupled weight decay",
    dense_class=DecoupledRowWiseAdagrad,
    settings=(LEARNING_RATE, EPS, WEIGHT_DECAY),
    start_setting="initial_accumulator_value",
    states=(StateTensor("sum", "momentum1", per_row=True),),
    counts_steps=True,
    decay_modes=(WeightDecayMode.DECOUPLE,),
)
