"""LAMB: the step of Adam, scaled to the length of the row that it changes; and LAMB with one divisor per row."""

from dataclasses import replace

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.optim.optimizers import LAMB as TorchRecLAMB
from torchrec.optim.optimizers import PartialRowWiseLAMB as TorchRecPartialRowWiseLAMB

from recfx.optim.rules.adam import AVERAGES, ROWWISE_AVERAGES, average_numbers, moving_averages
from recfx.optim.rules.rule import ANY_MODE, BETAS, EPS, LEARNING_RATE, WEIGHT_DECAY, Group, State, StepNumbers
from recfx.optim.rules.touched_rows import TouchedRowsOptimizer, TouchedRowsRule


class LambRule(TouchedRowsRule):
    """``weight -= lr * |weight| * step / |step|``, row by row; weight decay is part of the step."""

    def update(self, values: Tensor, gradient: Tensor, state: State, step: float, group: Group) -> Tensor:
        """Step as FBGEMM does, except that a step of zeros changes nothing; ``step`` counts the table's."""
        first, divisor = moving_averages(gradient, state, step, group)
        change = first / (1 - group["betas"][0] ** step) / divisor
        if group["weight_decay"]:
            change = change + group["weight_decay"] * values
        return values - float(group["lr"]) * scaled_to_weights(values, change)

    def step_numbers(self, step: float, group: Group) -> StepNumbers:
        """The first average is corrected by a number of its own: the learning rate scales the whole step."""
        return average_numbers(step, group)._replace(
            first_correction=1 - group["betas"][0] ** step, own_decay=float(group["weight_decay"])
        )


def scaled_to_weights(values: Tensor, change: Tensor) -> Tensor:
    """Each row of ``change``, a step, as long as the row of weights that it is for; a step of zeros stays one.

    FBGEMM divides zero by zero then, and the row becomes NaN.
    """
    length = change.norm(dim=1, keepdim=True)
    ratio = values.norm(dim=1, keepdim=True) / length
    return torch.where(length == 0, 0.0, ratio) * change


class Lamb(TouchedRowsOptimizer):
    """The optimizer for a table that is not fused."""


class PartialRowWiseLamb(TouchedRowsOptimizer):
    """Likewise, for partial row-wise LAMB."""


LAMB = LambRule(
    name="lamb", label="LAMB", dense_class=Lamb, placeholders=(TorchRecLAMB,), fused_types=(EmbOptimType.LAMB,),
    settings=(LEARNING_RATE, EPS, BETAS, WEIGHT_DECAY), states=AVERAGES, counts_steps=True, saves_step=True,
    decay_modes=ANY_MODE, when_cut=("scales the step of each row by norms over {blocks}", "Adam"),
)  # fmt: skip
PARTIAL_ROWWISE_LAMB = replace(
    LAMB,
    name="partial_rowwise_lamb",
    label="partial row-wise LAMB",
    dense_class=PartialRowWiseLamb,
    placeholders=(TorchRecPartialRowWiseLAMB,),
    fused_types=(EmbOptimType.PARTIAL_ROWWISE_LAMB,),
    states=ROWWISE_AVERAGES,
)
