"""Partial row-wise Adam: a moving average of gradients per element, and one of their mean square per row."""

from __future__ import annotations

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.optim.optimizers import PartialRowWiseAdam as TorchRecPartialRowWiseAdam

from recfx.optim.rules.adam import ROWWISE_AVERAGES, average_numbers, moving_averages
from recfx.optim.rules.rule import ANY_MODE, BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Group, State, StepNumbers
from recfx.optim.rules.touched_rows import TouchedRowsOptimizer, TouchedRowsRule


class PartialRowWiseAdamRule(TouchedRowsRule):
    """Adam whose divisor is one number per row. Weight decay is decoupled, as in AdamW."""

    def update(self, values: Tensor, gradient: Tensor, state: State, step: float, group: Group) -> Tensor:
        """Step as FBGEMM does; ``step`` is the number of steps of the table, not of the row."""
        rate, decay = float(group["lr"]), group["weight_decay"]
        first, divisor = moving_averages(gradient, state, step, group)
        kept = values - rate * decay * values if decay else values
        return kept - rate / (1 - group["betas"][0] ** step) * first / divisor

    def step_numbers(self, step: float, group: Group) -> StepNumbers:
        """The learning rate is divided by the correction of the first average; weight decay is the rule's own."""
        rate = float(group["lr"])
        return average_numbers(step, group)._replace(
            learning_rate=rate / (1 - group["betas"][0] ** step), own_decay=rate * float(group["weight_decay"])
        )


class PartialRowWiseAdam(TouchedRowsOptimizer):
    """The optimizer for a table that is not fused."""


PARTIAL_ROWWISE_ADAM = PartialRowWiseAdamRule(
    name="partial_rowwise_adam",
    label="partial row-wise Adam",
    dense_class=PartialRowWiseAdam,
    placeholders=(TorchRecPartialRowWiseAdam,),
    fused_types=(EmbOptimType.PARTIAL_ROWWISE_ADAM,),
    settings=(LEARNING_RATE, EPS, BETAS, WEIGHT_DECAY),
    states=ROWWISE_AVERAGES,
    counts_steps=True,
    saves_step=True,
    decay_modes=ANY_MODE,
    when_cut=("keeps one mean square per row in {blocks}", "Adam"),
)
