"""Partial row-wise Adam: a moving average of gradients per element, and one of their mean square per row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.optimizers import PartialRowWiseAdam as TorchRecPartialRowWiseAdam

from recfx.optim.rules.averages import AveragesOptimizer, average_numbers, moving_averages
from recfx.optim.rules.rule import ANY_MODE, BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Rule, StateTensor, StepNumbers
from recfx.optim.rules.touched_rows import TouchedRowsRule


class PartialRowWiseAdamRule(TouchedRowsRule):
    """Adam whose divisor is one number per row. Weight decay is decoupled, as in AdamW."""

    def update(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        step: float,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """Step as FBGEMM does; ``step`` is the number of steps of the table, not of the row."""
        rate, decay = float(group["lr"]), group["weight_decay"]
        first, divisor = moving_averages(gradient, state, step, group)
        kept = values - rate * decay * values if decay else values
        return kept - rate / (1 - group["betas"][0] ** step) * first / divisor

    def step_numbers(self, step: float, group: Mapping[str, Any]) -> StepNumbers:
        """The learning rate is divided by the correction of the first average; weight decay is the rule's own."""
        rate = float(group["lr"])
        return average_numbers(step, group)._replace(
            learning_rate=rate / (1 - group["betas"][0] ** step), own_decay=rate * float(group["weight_decay"])
        )

    def when_columns_are_cut(self, blocks: int) -> tuple[str, str]:
        """Each block of columns has its own mean square."""
        return self.cut_columns("keeps one mean square per row in", blocks, "Adam")


class PartialRowWiseAdam(AveragesOptimizer):
    """The optimizer for a table that is not fused."""

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
    decay_modes=ANY_MODE,
)
