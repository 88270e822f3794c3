"""Adam, partial row-wise Adam, and the moving averages of their family.

The correction of averages counts the steps of the table, not of the row.
"""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.optim.optimizers import Adam as TorchRecAdam
from torchrec.optim.optimizers import PartialRowWiseAdam as TorchRecPartialRowWiseAdam

from recfx.kernels.build.tiling import Need, RuleNeeds
from recfx.optim.rules.rule import (
    ANY_MODE,
    BETAS,
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Group,
    Rule,
    State,
    StateTensor,
    StepNumbers,
    decayed,
)
from recfx.optim.rules.touched_rows import TouchedRowsOptimizer, TouchedRowsRule

AVERAGES = (StateTensor("exp_avg", "momentum1"), StateTensor("exp_avg_sq", "exp_avg_sq"))
"""A moving average of the gradients, and one of their squares."""
ROWWISE_AVERAGES = (StateTensor("exp_avg", "momentum1"), StateTensor("exp_avg_sq", "exp_avg_sq", per_row=True))
"""A moving average of the gradients, and one of the mean of each row's squares."""


def moving_averages(gradient: Tensor, state: State, step: float, group: Group) -> tuple[Tensor, Tensor]:
    """Bring both averages up to date, in place; ``exp_avg_sq`` may be ``[n, 1]``, for the mean per row. Returns the
    average of the gradients, not corrected for its start at zero, and what it is divided by.
    """
    first_beta, second_beta = group["betas"]
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first.lerp_(gradient, 1 - first_beta)
    if second.shape == gradient.shape:
        second.mul_(second_beta).addcmul_(gradient, gradient, value=1 - second_beta)
    else:
        second.mul_(second_beta).add_(gradient.square().mean(dim=1, keepdim=True), alpha=1 - second_beta)
    return first, second.sqrt() / (1 - second_beta**step) ** 0.5 + group["eps"]


def average_numbers(step: float, group: Group) -> StepNumbers:
    """The learning rate, ``eps`` and the numbers of both averages; one minus a beta in float32 would lose digits."""
    first_beta, second_beta = group["betas"]
    return StepNumbers(
        learning_rate=float(group["lr"]),
        eps=float(group["eps"]),
        first_share=1 - first_beta,
        second_beta=second_beta,
        second_share=1 - second_beta,
        second_correction=(1 - second_beta**step) ** 0.5,
    )


class Adam(Rule):
    """Adam with two moving averages per element, which do not change while no batch touches the row."""

    def update(self, values: Tensor, gradient: Tensor, state: State, step: float, group: Group) -> Tensor:
        """Step as ``torch.optim.Adam`` does."""
        gradient = decayed(values, gradient, group)
        first, divisor = moving_averages(gradient, state, step, group)
        return values - float(group["lr"]) / (1 - group["betas"][0] ** step) * first / divisor

    def step_numbers(self, step: float, group: Group) -> StepNumbers:
        """The learning rate is divided by the correction of the first average."""
        rate = float(group["lr"]) / (1 - group["betas"][0] ** step)
        return average_numbers(step, group)._replace(
            learning_rate=rate, weight_decay=float(group.get("weight_decay", 0))
        )

    def unlike_dense(self, group: Group) -> str:
        """Never empty: the averages of dense Adam keep changing a row that no batch touches."""
        return self.label


ADAM = Adam(
    name="adam",
    label="Adam",
    dense_class=torch.optim.Adam,
    placeholders=(TorchRecAdam,),
    fused_types=(EmbOptimType.ADAM,),
    settings=(LEARNING_RATE, EPS, BETAS, WEIGHT_DECAY),
    states=AVERAGES,
    counts_steps=True,
    saves_step=True,
    decay_in_fused_params="FBGEMM's Adam subtracts it from the weights (AdamW), recfx's adds it to the gradient: leave "
    "it out, or attach torch.optim.Adam(weight_decay=...) with apply_optimizer_in_backward if you mean that rule.",
    needs=RuleNeeds("adam", Need(2320, 20, 32, 52), Need(288, 68)),
)


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
    name="partial_rowwise_adam", label="partial row-wise Adam", dense_class=PartialRowWiseAdam,
    placeholders=(TorchRecPartialRowWiseAdam,), fused_types=(EmbOptimType.PARTIAL_ROWWISE_ADAM,),
    settings=(LEARNING_RATE, EPS, BETAS, WEIGHT_DECAY), states=ROWWISE_AVERAGES, counts_steps=True, saves_step=True,
    decay_modes=ANY_MODE, when_cut=("keeps one mean square per row in {blocks}", "Adam"),
)  # fmt: skip
