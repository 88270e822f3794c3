"""Adam. Its bias correction uses the number of steps of the table, not of the row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.optimizers import Adam as TorchRecAdam

from recfx.kernels.build.tiling import Need
from recfx.optim.rules.averages import average_numbers, moving_averages
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
        """Step as ``torch.optim.Adam`` does."""
        gradient = decayed(values, gradient, group)
        first, divisor = moving_averages(gradient, state, step, group)
        return values - float(group["lr"]) / (1 - group["betas"][0] ** step) * first / divisor

    def step_numbers(self, step: float, group: Mapping[str, Any]) -> StepNumbers:
        """The learning rate is divided by the correction of the first average."""
        rate = float(group["lr"]) / (1 - group["betas"][0] ** step)
        return average_numbers(step, group)._replace(
            learning_rate=rate, weight_decay=float(group.get("weight_decay", 0))
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
