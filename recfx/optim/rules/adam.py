"""Adam. Its bias correction uses the number of steps of the table, not of the row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.optimizers import Adam as TorchRecAdam

from recfx.kernels.tiling import Need
from recfx.optim.rules.rule import BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Rule, StateTensor, StepNumbers, decayed


class Adam(Rule):
    """Adam with two moving averages per element, which do not change while no batch touches the row."""

    def update(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        step: float,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """The same step as ``torch.optim.Adam``."""
        gradient = decayed(values, gradient, group)
        first_beta, second_beta = group["betas"]
        first = state["exp_avg"].lerp_(gradient, 1 - first_beta)
        second = state["exp_avg_sq"].mul_(second_beta).addcmul_(gradient, gradient, value=1 - second_beta)
        denominator = second.sqrt() / (1 - second_beta**step) ** 0.5 + group["eps"]
        return values - float(group["lr"]) / (1 - first_beta**step) * first / denominator

    def step_numbers(self, step: float, group: Mapping[str, Any]) -> StepNumbers:
        """The betas are subtracted from one here: float32 would lose digits."""
        first_beta, second_beta = group["betas"]
        return (
            super()
            .step_numbers(step, group)
            ._replace(
                learning_rate=float(group["lr"]) / (1 - first_beta**step),
                first_share=1 - first_beta,
                second_beta=second_beta,
                second_share=1 - second_beta,
                second_correction=(1 - second_beta**step) ** 0.5,
            )
        )

    def unlike_dense(self, group: Mapping[str, Any]) -> str:
        """Never empty: the averages of dense Adam keep changing a row that no batch touches."""
        return self.label


ADAM = Adam(
    name="adam",
    label="Adam",
    dense_class=torch.optim.Adam,
    placeholders=(TorchRecAdam,),
    fused_types=(EmbOptimType.ADAM,),
    settings=(LEARNING_RATE, EPS, BETAS, WEIGHT_DECAY),
    states=(StateTensor("exp_avg", "momentum1"), StateTensor("exp_avg_sq", "exp_avg_sq")),
    counts_steps=True,
    saves_step=True,
    decay_in_fused_params="FBGEMM's Adam subtracts it from the weights (AdamW), recfx's adds it to the gradient: leave "
    "it out, or attach torch.optim.Adam(weight_decay=...) with apply_optimizer_in_backward if you mean that rule.",
    step_need=Need(384, 68),
    border_need=Need(288, 56),
)
