"""Partial row-wise Adam: a moving average of gradients per element, and one of their mean square per row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torchrec.optim.optimizers import PartialRowWiseAdam as TorchRecPartialRowWiseAdam

from recfx.optim.rules.rule import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Rule, StateTensor, StepNumbers
from recfx.optim.rules.touched_rows import TouchedRowsOptimizer


class PartialRowWiseAdamRule(Rule):
    """Adam whose divisor is one number per row. Weight decay is decoupled, as in AdamW."""

    def update(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        step: float,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """The same step as FBGEMM's; ``step`` is the number of steps of the table, not of the row."""
        rate, decay, (first_beta, second_beta) = float(group["lr"]), group["weight_decay"], group["betas"]
        first = state["exp_avg"].lerp_(gradient, 1 - first_beta)
        mean = gradient.square().mean(dim=1, keepdim=True)
        second = state["exp_avg_sq"].mul_(second_beta).add_(mean, alpha=1 - second_beta)
        divisor = second.sqrt() / (1 - second_beta**step) ** 0.5 + group["eps"]
        kept = values - rate * decay * values if decay else values
        return kept - rate / (1 - first_beta**step) * first / divisor

    def step_numbers(self, step: float, group: Mapping[str, Any]) -> StepNumbers:
        """The betas are subtracted from one here: float32 would lose digits."""
        rate, (first_beta, second_beta) = float(group["lr"]), group["betas"]
        return StepNumbers(
            learning_rate=rate / (1 - first_beta**step),
            eps=float(group["eps"]),
            first_share=1 - first_beta,
            second_beta=second_beta,
            second_share=1 - second_beta,
            second_correction=(1 - second_beta**step) ** 0.5,
            own_decay=rate * float(group["weight_decay"]),
        )

    def unlike_dense(self, group: Mapping[str, Any]) -> str:
        """Always empty: its dense form steps touched rows, too."""
        return ""

    def when_columns_are_cut(self, blocks: int) -> tuple[str, str]:
        """Each block of columns has its own mean square."""
        message = (
            f"partial row-wise Adam keeps one mean square per row in each of the {blocks} column blocks. "
            "TorchRec's does the same, but the uncut table would train differently."
        )
        return message, "use Adam, or do not cut columns, if training must not depend on the plan."


class PartialRowWiseAdam(TouchedRowsOptimizer):
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
        return PARTIAL_ROWWISE_ADAM


PARTIAL_ROWWISE_ADAM = PartialRowWiseAdamRule(
    name="partial_rowwise_adam",
    label="partial row-wise Adam",
    dense_class=PartialRowWiseAdam,
    placeholders=(TorchRecPartialRowWiseAdam,),
    fused_types=(EmbOptimType.PARTIAL_ROWWISE_ADAM,),
    settings=(LEARNING_RATE, EPS, BETAS, WEIGHT_DECAY),
    states=(
        StateTensor("exp_avg", "momentum1"),
        StateTensor("exp_avg_sq", "exp_avg_sq", per_row=True),
    ),
    counts_steps=True,
    saves_step=True,
    decay_modes=(WeightDecayMode.NONE,),  # FBGEMM's reads no mode
)
