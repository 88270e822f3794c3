"""``find_rows.py`` in ATen, table by table, on any device. It waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.index.find_rows import IndexFacts, ReadIndexes
from recfx.kernels.index.mix64 import mix64
from recfx.kernels.index.slot_table import find_rows_in_slots


def find_rows(ids: Tensor, table_ends: Tensor, indexes: ReadIndexes) -> tuple[Tensor, Tensor]:
    """The contract of the family."""
    rows, begin, absent = ids.clone(), 0, []
    for fields, end in zip(indexes.facts.tolist(), table_ends.tolist(), strict=True):
        facts, asked = IndexFacts(*fields), ids[begin:end]
        count = asked.new_zeros(())
        if facts.slot_mask >= 0:
            first = facts.slots_start // 2
            slots = indexes.slots[first : first + facts.slot_mask + 1]
            side_row = indexes.side_rows[facts.side_start : facts.side_start + 1]
            dense = max(0, min(facts.dense_rows - facts.row_begin, facts.rows))
            found = find_rows_in_slots(asked, slots, side_row, dense, facts.row_begin)
            count = (found < 0).sum()
            if facts.share_buckets > 0:
                found = torch.where(found < 0, _shared(asked, facts), found)
            rows[begin:end] = found
        absent.append(count)
        begin = end
    return rows, torch.stack(absent) if absent else ids.new_zeros(0)


def _shared(ids: Tensor, facts: IndexFacts) -> Tensor:
    """The row of the slice that each id reads if it has none of its own; -1 for ids of other slices."""
    buckets, index_rows = facts.share_buckets, facts.table_rows - facts.dense_rows
    # mix64 with a seed is mix64 of the id that was mixed with the seed.
    bucket = torch.remainder(mix64(ids ^ facts.mixed_seed) & 0x7FFFFFFFFFFFFFFF, buckets)
    begin = facts.dense_rows + torch.div(bucket * index_rows, buckets, rounding_mode="floor")
    end = facts.dense_rows + torch.div((bucket + 1) * index_rows, buckets, rounding_mode="floor")
    place = torch.remainder(mix64(ids ^ facts.mixed_next_seed) & 0x7FFFFFFFFFFFFFFF, end - begin)
    rows = begin + place - facts.row_begin
    is_foreign = ((ids >= 0) & (ids < facts.dense_rows)) | (rows < 0) | (rows >= facts.rows)
    return rows.masked_fill(is_foreign, -1)
