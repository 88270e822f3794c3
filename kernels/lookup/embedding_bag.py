"""Embedding lookups: the torch reference, forward and backward, in plain ATen.

A bag is the sum of its rows, multiplied by per-sample weights if given, and divided by ``max(length, 1)`` for MEAN.
Results are float32 whatever the table's dtype is, as in the standard collection.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def embedding_bag(
    weight: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    pooling: str,
    per_sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pool the bags of one feature, which begin in ``rows`` at ``offsets``, int64 ``[B + 1]``: float32 ``[B, dim]``;
    differentiable. ``pooling`` is ``"SUM"``, the only one with ``per_sample_weights``, or ``"MEAN"``.
    """
    if per_sample_weights is not None:
        per_sample_weights = per_sample_weights.to(weight.dtype)
    return functional.embedding_bag(
        rows, weight, offsets, mode=pooling.lower(), per_sample_weights=per_sample_weights, include_last_offset=True
    ).float()


def embedding(weight: torch.Tensor, rows: torch.Tensor, may_be_absent: bool = True) -> torch.Tensor:
    """The rows themselves, one per id, float32 ``[n, dim]``; differentiable. A row of -1, which there may be only if
    rows ``may_be_absent``, reads zeros and gets no gradient.
    """
    if not may_be_absent:
        return functional.embedding(rows, weight).float()
    read = functional.embedding(rows.clamp(min=0), weight).float()
    return torch.where((rows >= 0).unsqueeze(1), read, 0.0)


def row_gradients(
    grad_output: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    pooling: str,
    per_sample_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of one feature's bags with respect to each row that was looked up: the bag of each id, int64
    ``[n]``, and float32 ``[n, dim]``. ``grad_output`` is ``[B, dim]``, or ``[n, dim]`` with pooling ``"NONE"``.
    """
    if pooling == "NONE":
        return torch.arange(rows.numel(), device=rows.device), grad_output.float()
    lengths = offsets.diff()
    bag = torch.repeat_interleave(torch.arange(lengths.numel(), device=rows.device), lengths, output_size=rows.numel())
    gradient = grad_output.float()
    if pooling == "MEAN":
        gradient = gradient / lengths.clamp(min=1).unsqueeze(1)
    gradient = gradient.index_select(0, bag)
    if per_sample_weights is not None:
        gradient = gradient * per_sample_weights.float().unsqueeze(1)
    return bag, gradient
