"""Partial row-wise LAMB: LAMB whose divisor is one number per row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.optim.optimizers import PartialRowWiseLAMB as TorchRecPartialRowWiseLAMB

from recfx.optim.rules.rule import (
    BETAS,
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Rule,
    StateTensor,
    StepNumbers,
    scaled_to_weights,
)
from recfx.optim.rules.touched_rows import TouchedRowsOptimizer


class PartialRowWiseLambRule(Rule):
    """``weight -= lr * |weight| * step / |step|``, row by row; weight decay is part of the step."""

    def update(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        step: float,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """The same step as FBGEMM's, except that a step of zeros changes nothing; ``step`` counts the table's."""
        first_beta, second_beta = group["betas"]
        first = state["exp_avg"].lerp_(gradient, 1 - first_beta)
        mean = gradient.square().mean(dim=1, keepdim=True)
        second = state["exp_avg_sq"].mul_(second_beta).add_(mean, alpha=1 - second_beta)
        divisor = second.sqrt() / (1 - second_beta**step) ** 0.5 + group["eps"]
        wanted = first / (1 - first_beta**step) / divisor
        if group["weight_decay"]:
            wanted = wanted + group["weight_decay"] * values
        return values - float(group["lr"]) * scaled_to_weights(values, wanted)

    def step_numbers(self, step: float, group: Mapping[str, Any]) -> StepNumbers:
        """The betas are subtracted from one here: float32 would lose digits."""
        first_beta, second_beta = group["betas"]
        return StepNumbers(
            learning_rate=float(group["lr"]),
            eps=float(group["eps"]),
            first_share=1 - first_beta,
            second_beta=second_beta,
            second_share=1 - second_beta,
            second_correction=(1 - second_beta**step) ** 0.5,
            first_correction=1 - first_beta**step,
            own_decay=float(group["weight_decay"]),
        )

    def unlike_dense(self, group: Mapping[str, Any]) -> str:
        """Always empty: its dense form steps touched rows, too."""
        return ""

    def when_columns_are_cut(self, blocks: int) -> tuple[str, str]:
        """Norms are those of a block of the row."""
        message = (
            f"partial row-wise LAMB scales the step of each row by norms over each of the {blocks} column blocks. "
            "TorchRec's does the same, but the uncut table would train differently."
        )
        return message, "use Adam, or do not cut columns, if training must not depend on the plan."


class PartialRowWiseLamb(TouchedRowsOptimizer):
    """The same on a plain table. Defaults are FBGEMM's."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @property
    def rule(self) -> Rule:
        """Itself."""
        return PARTIAL_ROWWISE_LAMB


PARTIAL_ROWWISE_LAMB = PartialRowWiseLambRule(
    name="partial_rowwise_lamb",
    label="partial row-wise LAMB",
    dense_class=PartialRowWiseLamb,
    placeholders=(TorchRecPartialRowWiseLAMB,),
    fused_types=(EmbOptimType.PARTIAL_ROWWISE_LAMB,),
    settings=(LEARNING_RATE, EPS, BETAS, WEIGHT_DECAY),
    states=(
        StateTensor("exp_avg", "momentum1"),
        StateTensor("exp_avg_sq", "exp_avg_sq", per_row=True),
    ),
    counts_steps=True,
    saves_step=True,
    decay_modes=(WeightDecayMode.NONE,),  # FBGEMM's reads no mode
)
