"""The gradient of pooled lookups with respect to their per-sample weights, in ATen."""

from __future__ import annotations

import torch
from torch import Tensor


def per_sample_weight_gradients(
    rows: Tensor, offsets: Tensor, gradients: Tensor, weights: list[Tensor], table_of_feature: list[int]
) -> Tensor:
    """For each position, the gradient of its bag times its row; see ``per_sample_weights_op.py``."""
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    found = torch.zeros(rows.numel(), dtype=torch.float32, device=rows.device)
    column = 0
    for feature, table in enumerate(table_of_feature):
        weight = weights[table]
        bags = offsets[feature * batch_size : (feature + 1) * batch_size + 1]
        begin, end = int(bags[0]), int(bags[-1])
        bag = torch.repeat_interleave(torch.arange(batch_size, device=rows.device), bags.diff())
        asked = rows[begin:end]
        gradient = gradients[:, column : column + weight.shape[1]].float().index_select(0, bag)
        products = (gradient * weight.index_select(0, asked.clamp(min=0)).float()).sum(dim=1)
        found[begin:end] = products.masked_fill(asked < 0, 0.0)
        column += weight.shape[1]
    return found
