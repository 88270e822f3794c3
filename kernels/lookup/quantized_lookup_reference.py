"""Pooled lookups of quantized rows in ATen; ``quantized_rows.py`` says what the bytes of a row are."""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.lookup.quantized_rows import codes_and_range


def quantized_lookup(
    rows: Tensor,
    offsets: Tensor,
    tables: list[Tensor],
    dims: list[int],
    bits: int,
    table_of_feature: list[int],
    mean: bool,
    per_sample_weights: Tensor | None,
) -> Tensor:
    """Pool dequantized rows to float32 ``[B, sum of the features' dims]``, all sums in the order of the positions.

    A row counts as ``code * (scale * w) + bias * w``, with its per-sample weight ``w``.

    Args:
        rows: int64 ``[n]``, the row in the feature's table of each position; a row of -1 adds nothing.
        offsets: int64 ``[F * B + 1]``, where the bags begin in ``rows``, feature by feature.
        tables: uint8 ``[rows of the table, row_bytes]`` each, with any padding at the ends of rows.
        dims: the columns of each table.
        bits: per code, 8 or 4, of all tables.
        table_of_feature: the table of each of the ``F`` features.
        mean: divide by the length of the bag, absent rows included; an empty bag is zeros.
        per_sample_weights: float32 ``[n]``.
    """
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    pooled: list[Tensor] = []
    for feature in range(len(table_of_feature)):
        table, dim = tables[table_of_feature[feature]], dims[table_of_feature[feature]]
        bags = offsets[feature * batch_size : (feature + 1) * batch_size + 1]
        begin, end = int(bags[0]), int(bags[-1])
        lengths = bags[1:] - bags[:-1]
        bag = torch.repeat_interleave(torch.arange(batch_size, device=rows.device), lengths)
        present = rows[begin:end] >= 0
        codes, scale, bias = codes_and_range(table[rows[begin:end][present]], dim, bits)
        if per_sample_weights is not None:
            weights = per_sample_weights[begin:end][present].unsqueeze(1)
            scale, bias = scale * weights, bias * weights
        sums = torch.zeros(batch_size, dim, dtype=torch.float32, device=rows.device)
        sums.index_add_(0, bag[present], codes * scale + bias)
        pooled.append(sums / lengths.clamp(min=1).unsqueeze(1) if mean else sums)
    return torch.cat(pooled, dim=1)
