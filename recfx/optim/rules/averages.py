"""What the rules of Adam's family have in common: a moving average of gradients, and one of their squares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from recfx.optim.rules.rule import StepNumbers
from recfx.optim.rules.touched_rows import TouchedRowsOptimizer


def moving_averages(
    gradient: torch.Tensor, state: dict[str, torch.Tensor], step: float, group: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bring both averages up to date, in place.

    Args:
        gradient: ``[n, dim]``.
        state: ``exp_avg`` ``[n, dim]``, and ``exp_avg_sq`` of the same shape, or ``[n, 1]`` for the mean per row.
        step: the number of steps of the table, including this one.
        group: the settings.

    Returns:
        the average of the gradients, not corrected for its start at zero, and what it is divided by.
    """
    first_beta, second_beta = group["betas"]
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first.lerp_(gradient, 1 - first_beta)
    if second.shape == gradient.shape:
        second.mul_(second_beta).addcmul_(gradient, gradient, value=1 - second_beta)
    else:
        second.mul_(second_beta).add_(gradient.square().mean(dim=1, keepdim=True), alpha=1 - second_beta)
    return first, second.sqrt() / (1 - second_beta**step) ** 0.5 + group["eps"]


def average_numbers(step: float, group: Mapping[str, Any]) -> StepNumbers:
    """The learning rate, ``eps`` and the numbers of both averages; arguments as for ``Rule.step_numbers``.

    The betas are subtracted from one here: float32 would lose digits.
    """
    first_beta, second_beta = group["betas"]
    return StepNumbers(
        learning_rate=float(group["lr"]),
        eps=float(group["eps"]),
        first_share=1 - first_beta,
        second_beta=second_beta,
        second_share=1 - second_beta,
        second_correction=(1 - second_beta**step) ** 0.5,
    )


class AveragesOptimizer(TouchedRowsOptimizer):
    """Such a rule on a plain table. Defaults are FBGEMM's."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
