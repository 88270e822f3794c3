"""``served_lookup.py`` in ATen, feature by feature; the definition of what files answer."""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.index.buckets import shared_rows
from recfx.kernels.index.slot_table import find_rows_in_slots
from recfx.kernels.lookup.quantized_rows import dequantize_rows, row_bytes
from recfx.kernels.lookup.served_lookup import ServedTable


def served_lookup(
    ids: Tensor,
    offsets: Tensor,
    rows: Tensor,
    tables: list[ServedTable],
    table_of_feature: list[int],
    slots: Tensor,
    mean: bool = False,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Has the contract of the operator."""
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    values = _values(rows, tables)
    slot_tables = slots.split([table.slots for table in tables])
    pooled = []
    for feature, number in enumerate(table_of_feature):
        table = tables[number]
        bags = offsets[feature * batch_size : (feature + 1) * batch_size + 1]
        stretch = slice(int(bags[0]), int(bags[-1]))
        found = _rows_of(ids[stretch], table, slot_tables[number])
        if bool((found < (-1 if table.slots else 0)).any() or (found >= table.num_rows).any()):
            raise IndexError("an id has no row in its table [id_out_of_range]")
        read = values[number][found.clamp(min=0)] * (found >= 0).unsqueeze(1)
        if per_sample_weights is not None:
            read = read * per_sample_weights[stretch].unsqueeze(1)
        bag = torch.repeat_interleave(torch.arange(batch_size), bags.diff())
        sums = torch.zeros(batch_size, table.columns).index_add_(0, bag, read)
        pooled.append(sums / bags.diff().clamp(min=1).unsqueeze(1) if mean else sums)
    return torch.cat(pooled, dim=1)


def _rows_of(ids: Tensor, table: ServedTable, slots: Tensor) -> Tensor:
    if table.slots == 0:
        return ids
    found = find_rows_in_slots(ids, slots, torch.tensor([table.side_row]), table.dense_rows)
    if table.share_buckets == 0:
        return found
    shared = shared_rows(ids, table.num_rows, table.dense_rows, table.share_buckets, table.seed)
    return torch.where(found < 0, shared, found)


def _values(rows: Tensor, tables: list[ServedTable]) -> list[Tensor]:
    """The rows of each table, float32 ``[count, columns]``."""
    found, begin = [], 0
    for table in tables:
        bits = (32, 16, 8, 4)[table.row_format]
        size = row_bytes(table.columns, bits) if bits <= 8 else table.columns * bits // 8
        stored = rows[begin : begin + table.num_rows * size].view(table.num_rows, size)
        begin += table.num_rows * size
        if bits <= 8:
            found.append(dequantize_rows(stored, table.columns, bits))
        else:
            found.append(stored.clone().view(torch.float32 if bits == 32 else torch.float16).float())
    return found
