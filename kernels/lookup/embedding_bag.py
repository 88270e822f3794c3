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
    """Pool the bags of one feature; differentiable.

    Args:
        weight: ``[table rows, dim]``, any float dtype.
        rows: ``[n]`` int64.
        offsets: ``[B + 1]`` int64, where bags begin in ``rows``.
        pooling: ``"SUM"`` or ``"MEAN"``.
        per_sample_weights: ``[n]``, or None. SUM only.

    Returns:
        ``[B, dim]`` float32.
    """
    if per_sample_weights is not None:
        per_sample_weights = per_sample_weights.to(weight.dtype)
    return functional.embedding_bag(
        rows, weight, offsets, mode=pooling.lower(), per_sample_weights=per_sample_weights, include_last_offset=True
    ).float()


def embedding(weight: torch.Tensor, rows: torch.Tensor, may_be_absent: bool = True) -> torch.Tensor:
    """The rows themselves, one per id; differentiable.

    Args:
        weight: ``[table rows, dim]``, any float dtype.
        rows: ``[n]`` int64; -1 reads zeros and gets no gradient.
        may_be_absent: False if no row is -1.

    Returns:
        ``[n, dim]`` float32.
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
    """The gradient of one feature's bags with respect to each row that was looked up.

    Args:
        grad_output: ``[B, dim]``; ``[n, dim]`` with pooling ``"NONE"``.
        rows, offsets, pooling, per_sample_weights: as in :func:`embedding_bag`.

    Returns:
        ``bag``, int64 ``[n]``, the bag of each id; and ``gradient``, float32 ``[n, dim]``.
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
