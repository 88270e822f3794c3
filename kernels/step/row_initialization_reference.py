"""``row_initialization.py`` in ATen, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.index.mix64 import mix64


def initial_rows(ids: Tensor, dim: int, key: int, low: float, high: float, first_column: int = 0) -> Tensor:
    """The initial rows of these ids, on their device. Scriptable.

    Args:
        ids: int64 ``[n]``.
        dim: the number of columns of the weight.
        key: from ``initialization_key``.
        low, high: the range, rounded to float32.
        first_column: the weight's first column in the table, if the weight is a shard of some of its columns.

    Returns:
        float32 ``[n, dim]``.
    """
    column = torch.arange(first_column + 1, first_column + dim + 1, dtype=torch.int64, device=ids.device)
    bits = mix64(mix64(ids ^ key).unsqueeze(1) + column * -7046029254386353131)  # 0x9E3779B97F4A7C15
    uniform = ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 5.9604644775390625e-08  # 2 ** -24, exact
    # The ends are rounded to float32 before they are subtracted, as in C++.
    ends = torch.tensor([low, high], dtype=torch.float32, device=ids.device)
    return uniform * (ends[1] - ends[0]) + ends[0]


def initialize_rows(
    weight: Tensor, rows: Tensor, ids: Tensor, key: int, low: float, high: float, first_column: int = 0
) -> None:
    """The operator's contract, except that all tensors may be on any device and have any strides."""
    values = initial_rows(ids.to(weight.device), weight.size(1), key, low, high, first_column)
    weight.data.index_copy_(0, rows.to(weight.device), values.to(weight.dtype))  # why ``data``: see the operator
