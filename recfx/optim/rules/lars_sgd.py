"""LARS-SGD: SGD with momentum, whose learning rate is scaled by the norms of the row and of its gradient."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torchrec.optim.optimizers import LarsSGD as TorchRecLarsSGD

from recfx.optim.rules.rule import (
    ANY_MODE,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Group,
    Setting,
    State,
    StateTensor,
    StepNumbers,
)
from recfx.optim.rules.touched_rows import TouchedRowsOptimizer, TouchedRowsRule

ETA = Setting("eta", 0.001, ("eta",))
MOMENTUM = Setting("momentum", 0.9, ("momentum",))


class LarsSgdRule(TouchedRowsRule):
    """``rate = lr * eta * |weight| / (|gradient| + weight_decay * |weight|)``, row by row."""

    def update(self, values: Tensor, gradient: Tensor, state: State, step: float, group: Group) -> Tensor:
        """Step as FBGEMM does, except that a row without gradient and weight decay has a rate of 0."""
        decay = group["weight_decay"]
        length = values.norm(dim=1, keepdim=True)
        divisor = gradient.norm(dim=1, keepdim=True) + decay * length
        rate = torch.where(divisor == 0, 0.0, float(group["lr"]) * group["eta"] * length / divisor)
        moved = state["momentum_buffer"].mul_(group["momentum"]).add_(rate * (gradient + decay * values))
        return values - moved

    def step_numbers(self, step: float, group: Group) -> StepNumbers:
        """The learning rate is multiplied by ``eta``."""
        return StepNumbers(
            learning_rate=float(group["lr"]) * group["eta"],
            own_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
        )


class LarsSgd(TouchedRowsOptimizer):
    """The optimizer for a table that is not fused."""


LARS_SGD = LarsSgdRule(
    name="lars_sgd",
    label="LARS-SGD",
    dense_class=LarsSgd,
    placeholders=(TorchRecLarsSGD,),
    fused_types=(EmbOptimType.LARS_SGD,),
    settings=(LEARNING_RATE, ETA, MOMENTUM, WEIGHT_DECAY),
    states=(StateTensor("momentum_buffer", "momentum1"),),
    decay_modes=ANY_MODE,
    when_cut=("scales the learning rate of each row by norms over {blocks}", "SGD"),
)
