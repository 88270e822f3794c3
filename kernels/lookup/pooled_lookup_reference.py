"""``pooled_lookup.py`` in ATen. Scriptable."""

from __future__ import annotations

import torch
from torch import Tensor


def pooled_lookup(
    rows: Tensor,
    offsets: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    mean: bool,
    per_sample_weights: Tensor | None,
    unpooled: bool = False,
) -> Tensor:
    """Pool the rows to ``[B, sum of the features' dims]``, or copy them to ``[n, dim]``."""
    if unpooled:
        return gather_rows(rows, offsets, weights, table_of_feature)
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    pooled: list[Tensor] = []
    for feature in range(len(table_of_feature)):
        weight = weights[table_of_feature[feature]]
        bags = offsets[feature * batch_size : (feature + 1) * batch_size + 1]
        begin, end = int(bags[0]), int(bags[-1])
        present = rows[begin:end] >= 0
        values = weight[rows[begin:end][present]].float()
        if per_sample_weights is not None:
            values = values * per_sample_weights[begin:end][present].unsqueeze(1)
        pooled.append(pool_bags(values, present, bags, mean))
    return torch.cat(pooled, dim=1)


def gather_rows(rows: Tensor, offsets: Tensor, weights: list[Tensor], table_of_feature: list[int]) -> Tensor:
    """The rows as they are: float32 ``[n, dim]``."""
    gathered = torch.zeros(rows.numel(), weights[0].size(1), dtype=torch.float32, device=rows.device)
    for feature in range(len(table_of_feature)):
        begin, end = int(offsets[feature]), int(offsets[feature + 1])
        present = rows[begin:end] >= 0
        gathered[begin:end][present] = weights[table_of_feature[feature]][rows[begin:end][present]].float()
    return gathered


def pool_bags(values: Tensor, present: Tensor, bags: Tensor, mean: bool) -> Tensor:
    """The bags of one feature: float32 ``[B, dim]``.

    Args:
        values: float32 ``[present ids, dim]``.
        present: bool ``[ids]``, which of the bags' ids have a value; the others count in a mean all the same.
        bags: int64 ``[B + 1]``, where the bags begin.
        mean: divide each sum by the bag's length.
    """
    lengths = bags[1:] - bags[:-1]
    bag = torch.repeat_interleave(torch.arange(lengths.numel(), device=values.device), lengths)
    sums = torch.zeros(lengths.numel(), values.size(1), dtype=torch.float32, device=values.device)
    sums.index_add_(0, bag[present], values)
    return sums / lengths.clamp(min=1).unsqueeze(1) if mean else sums
