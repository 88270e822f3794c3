"""LAMB: the step of Adam, scaled to the length of the row that it changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.optimizers import LAMB as TorchRecLAMB

from recfx.optim.rules.averages import AveragesOptimizer, average_numbers, moving_averages
from recfx.optim.rules.rule import (
    ANY_MODE,
    BETAS,
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Rule,
    StateTensor,
    StepNumbers,
    scaled_to_weights,
)
from recfx.optim.rules.touched_rows import TouchedRowsRule


class LambRule(TouchedRowsRule):
    """``weight -= lr * |weight| * step / |step|``, row by row; weight decay is part of the step."""

    def update(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        step: float,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """Step as FBGEMM does, except that a step of zeros changes nothing; ``step`` counts the table's."""
        first, divisor = moving_averages(gradient, state, step, group)
        wanted = first / (1 - group["betas"][0] ** step) / divisor
        if group["weight_decay"]:
            wanted = wanted + group["weight_decay"] * values
        return values - float(group["lr"]) * scaled_to_weights(values, wanted)

    def step_numbers(self, step: float, group: Mapping[str, Any]) -> StepNumbers:
        """The first average is corrected by a number of its own: the learning rate scales the whole step."""
        return average_numbers(step, group)._replace(
            first_correction=1 - group["betas"][0] ** step, own_decay=float(group["weight_decay"])
        )

    def when_columns_are_cut(self, blocks: int) -> tuple[str, str]:
        """Norms are those of a block of the row."""
        return self.cut_columns("scales the step of each row by norms over", blocks, "Adam")


class Lamb(AveragesOptimizer):
    """The optimizer for a table that is not fused."""

    @property
    def rule(self) -> Rule:
        """Itself."""
        return LAMB


LAMB = LambRule(
    name="lamb",
    label="LAMB",
    dense_class=Lamb,
    placeholders=(TorchRecLAMB,),
    fused_types=(EmbOptimType.LAMB,),
    settings=(LEARNING_RATE, EPS, BETAS, WEIGHT_DECAY),
    states=(
        StateTensor("exp_avg", "momentum1"),
        StateTensor("exp_avg_sq", "exp_avg_sq"),
    ),
    counts_steps=True,
    saves_step=True,
    decay_modes=ANY_MODE,
)
