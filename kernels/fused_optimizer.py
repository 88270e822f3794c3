"""Fused optimizers: the torch reference of one step on the touched rows alone.

The rules are those of ``torch.optim.SGD``, ``Adagrad``, ``Adam`` and ``torchrec.optim.RowWiseAdagrad``, masked to the
rows that the batch touched. Arithmetic is float32; the result is rounded to the table's dtype once.
"""

from __future__ import annotations

from typing import Any

import torch


def fused_step(
    kind: str,
    weight: torch.Tensor,
    rows: torch.Tensor,
    gradient: torch.Tensor,
    group: dict[str, Any],
    state: dict[str, Any],
) -> None:
    """Update the touched rows of one table, in place.

    Args:
        kind: ``"sgd"``, ``"adagrad"``, ``"rowwise_adagrad"`` or ``"adam"``.
        weight: ``[table rows, dim]``.
        rows: ``[n]`` int64, repeats allowed.
        gradient: ``[n, dim]`` float32; gradients of a repeated row are summed.
        group: ``lr`` and, as the rule needs, ``eps``, ``betas``, ``weight_decay``.
        state: the table's state tensors, updated in place; ``step`` counts batches.
    """
    touched, inverse = torch.unique(rows, return_inverse=True)
    summed = torch.zeros(touched.numel(), weight.shape[1], dtype=torch.float32, device=weight.device)
    summed.index_add_(0, inverse, gradient)
    values = weight.index_select(0, touched).float()
    weight_decay = group.get("weight_decay", 0)
    if weight_decay:
        summed = summed + weight_decay * values
    if kind != "sgd":
        state["step"] += 1
    values = _RULES[kind](values, touched, summed, group, state)
    weight.index_copy_(0, touched, values.to(weight.dtype))


def _sgd(
    values: torch.Tensor, touched: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], state: dict[str, Any]
) -> torch.Tensor:
    return values - float(group["lr"]) * gradient


def _adagrad(
    values: torch.Tensor, touched: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], state: dict[str, Any]
) -> torch.Tensor:
    total = state["sum"].index_select(0, touched) + gradient.square()
    state["sum"].index_copy_(0, touched, total)
    return values - float(group["lr"]) * gradient / (total.sqrt() + group["eps"])


def _rowwise_adagrad(
    values: torch.Tensor, touched: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], state: dict[str, Any]
) -> torch.Tensor:
    total = state["sum"].index_select(0, touched) + gradient.square().mean(dim=1, keepdim=True)
    state["sum"].index_copy_(0, touched, total)
    return values - float(group["lr"]) * gradient / (total.sqrt() + group["eps"])


def _adam(
    values: torch.Tensor, touched: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], state: dict[str, Any]
) -> torch.Tensor:
    first_beta, second_beta = group["betas"]
    step = float(state["step"])
    first = state["exp_avg"].index_select(0, touched).lerp_(gradient, 1 - first_beta)
    second = state["exp_avg_sq"].index_select(0, touched).mul_(second_beta)
    second.addcmul_(gradient, gradient, value=1 - second_beta)
    state["exp_avg"].index_copy_(0, touched, first)
    state["exp_avg_sq"].index_copy_(0, touched, second)
    denominator = second.sqrt() / (1 - second_beta**step) ** 0.5 + group["eps"]
    return values - float(group["lr"]) / (1 - first_beta**step) * first / denominator


_RULES = {"sgd": _sgd, "adagrad": _adagrad, "rowwise_adagrad": _rowwise_adagrad, "adam": _adam}
