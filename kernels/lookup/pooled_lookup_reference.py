"""``pooled_lookup.py`` in ATen. Scriptable."""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.index.buckets import shared_rows
from recfx.kernels.index.hash_index_reference import find


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


def find_and_pool(
    ids: Tensor,
    offsets: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    slot_groups: list[Tensor],
    side_rows: list[Tensor],
    dense_rows: list[int],
    share_buckets: list[int],
    seeds: list[int],
    table_rows: list[int],
    row_begins: list[int],
    per_sample_weights: Tensor | None,
    unpooled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the pooled output, the rows, and the number of absent ids per table."""
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    rows = torch.full_like(ids, -1)
    absent = torch.zeros(len(weights), dtype=torch.int64)
    for feature in range(len(table_of_feature)):
        table = table_of_feature[feature]
        begin, end = int(offsets[feature * batch_size]), int(offsets[(feature + 1) * batch_size])
        asked = ids[begin:end]
        rows_of_ids = asked
        if slot_groups[table].numel() > 0:
            own, first, dense = weights[table].size(0), row_begins[table], dense_rows[table]
            own_dense = max(0, min(dense - first, own))
            rows_of_ids = find(asked, slot_groups[table], side_rows[table], own_dense, None, first)
            absent[table] += (rows_of_ids < 0).sum()
            if share_buckets[table] != 0:
                size = own if table_rows[table] == 0 else table_rows[table]
                shared = shared_rows(asked, size, dense, share_buckets[table], seeds[table]) - first
                is_foreign = ((asked >= 0) & (asked < dense)) | (shared < 0) | (shared >= own)
                rows_of_ids = torch.where(rows_of_ids < 0, shared.masked_fill(is_foreign, -1), rows_of_ids)
        rows[begin:end] = rows_of_ids
    pooled = pooled_lookup(rows, offsets, weights, table_of_feature, False, per_sample_weights, unpooled)
    return pooled, rows, absent


def pool_again_(
    pooled: Tensor,
    rows: Tensor,
    changed: Tensor,
    offsets: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    per_sample_weights: Tensor | None,
    unpooled: bool = False,
) -> None:
    """Replace the sums of the bags that contain a changed row."""
    now = pooled_lookup(rows, offsets, weights, table_of_feature, False, per_sample_weights, unpooled)
    if unpooled:
        pooled[changed] = now[changed]
        return
    before = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(changed.to(torch.int64), 0)])
    counts = before[offsets]
    bag_changed = (counts[1:] > counts[:-1]).view(len(table_of_feature), -1)
    column = 0
    for feature in range(len(table_of_feature)):
        end = column + weights[table_of_feature[feature]].size(1)
        mask = bag_changed[feature].unsqueeze(1)
        pooled[:, column:end] = torch.where(mask, now[:, column:end], pooled[:, column:end])
        column = end
