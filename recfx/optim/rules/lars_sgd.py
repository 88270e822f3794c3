"""LARS-SGD: SGD with momentum, whose learning rate is scaled by the norms of the row and of its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.optim.optimizers import LarsSGD as TorchRecLarsSGD

from recfx.optim.rules.rule import ANY_MODE, LEARNING_RATE, WEIGHT_DECAY, Rule, Setting, StateTensor, StepNumbers
from recfx.optim.rules.touched_rows import TouchedRowsOptimizer, TouchedRowsRule

ETA = Setting("eta", 0.001, ("eta",))
MOMENTUM = Setting("momentum", 0.9, ("momentum",))


class LarsSgdRule(TouchedRowsRule):
    """``rate = lr * eta * |weight| / (|gradient| + weight_decay * |weight|)``, row by row."""

    def update(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
        step: float,
        group: Mapping[str, Any],
    ) -> torch.Tensor:
        """Step as FBGEMM does, except that a row without gradient and weight decay has a rate of 0."""
        decay = group["weight_decay"]
        length = values.norm(dim=1, keepdim=True)
        wanted = gradient.norm(dim=1, keepdim=True) + decay * length
        rate = torch.where(wanted == 0, 0.0, float(group["lr"]) * group["eta"] * length / wanted)
        moved = state["momentum_buffer"].mul_(group["momentum"]).add_(rate * (gradient + decay * values))
        return values - moved

    def step_numbers(self, step: float, group: Mapping[str, Any]) -> StepNumbers:
        """The learning rate is multiplied by ``eta``."""
        return StepNumbers(
            learning_rate=float(group["lr"]) * group["eta"],
            own_decay=float(group["weight_decay"]),
            momentum=float(group["momentum"]),
        )

    def when_columns_are_cut(self, blocks: int) -> tuple[str, str]:
        """Norms are those of a block of the row."""
        return self.cut_columns("scales the learning rate of each row by norms over", blocks, "SGD")


class LarsSgd(TouchedRowsOptimizer):
    """The optimizer for a table that is not fused. Its defaults are FBGEMM's."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        eta: float = 0.001,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "eta": eta, "momentum": momentum, "weight_decay": weight_decay})

    @property
    def rule(self) -> Rule:
        """Itself."""
        return LARS_SGD


LARS_SGD = LarsSgdRule(
    name="lars_sgd",
    label="LARS-SGD",
    dense_class=LarsSgd,
    placeholders=(TorchRecLarsSGD,),
    fused_types=(EmbOptimType.LARS_SGD,),
    settings=(LEARNING_RATE, ETA, MOMENTUM, WEIGHT_DECAY),
    states=(StateTensor("momentum_buffer", "momentum1"),),
    decay_modes=ANY_MODE,
)
