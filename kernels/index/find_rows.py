"""Finding ids in indexes that are only read, where the ids are.

``recfx::find_rows_triton`` runs by the kernel in ``find_rows_triton.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build import launch
from recfx.kernels.build.plain_arguments import triton_operator
from recfx.kernels.index.index_buffers import IndexView
from recfx.kernels.index.mix64 import mix64, mix64_integer
from recfx.kernels.index.slot_table import find_rows_in_slots

_LANES = 64  # ids of a program on a GPU; 32 to 128 were alike on an H200
_LINE = 8  # int64 values of one cache line, into which one program writes


class IndexFacts(NamedTuple):
    """What the kernel has to know of one index: a row of ``ReadIndexes.facts``, in the order of its constants."""

    slots_start: int  # elements of `slots` before those of the table
    slot_mask: int  # the number of the table's slots - 1; -1 if it has no index
    side_start: int  # elements of `side_rows` before that of the table
    row_begin: int  # the table's row at which this slice of it begins
    rows: int  # of the slice
    dense_rows: int  # of the table
    share_buckets: int  # 0: an id without a row of its own reads nothing; below 0: the last row of its bucket
    table_rows: int
    mixed_seed: int
    mixed_next_seed: int

    @classmethod
    def without_index(cls) -> IndexFacts:
        """The facts of a table whose ids are its rows."""
        return cls(0, -1, 0, 0, 0, 0, 0, 0, 0, 0)

    @classmethod
    def of(cls, view: IndexView, table: int, slots_before: int, slots: int, rows: int) -> IndexFacts:
        """The facts of an index, as eval mode reads it, of the table at a position, with its slots and rows."""
        return cls(
            slots_start=2 * slots_before, slot_mask=slots - 1, side_start=table, row_begin=view.row_begin, rows=rows,
            dense_rows=view.dense_rows, share_buckets=view.share_buckets, table_rows=view.table_rows or rows,
            mixed_seed=mix64_integer(view.seed), mixed_next_seed=mix64_integer(view.seed + 1),
        )  # fmt: skip


class ReadIndexes(NamedTuple):
    """The indexes of all tables of a lookup, on one device."""

    slots: Tensor  # int64 [slots of all tables, 2], see slot_table.py
    side_rows: Tensor  # int64 [tables]: the row of id -1; -1 if it has none
    facts: Tensor  # int64 [tables, 10]: one IndexFacts per table


def find_rows(ids: Tensor, table_ends: Tensor, indexes: ReadIndexes) -> tuple[Tensor, Tensor]:
    """Find the row of each id by the kernel, without waiting for the device.

    Args:
        ids: int64 ``[n]``, any values, ordered by table.
        table_ends: int64 ``[tables]``, where the ids of each table end; the last one is ``n``.
        indexes: on the device of the ids.

    Returns:
        rows: int64 ``[n]``: the row of each id. An id that has none reads the row that it shares, if its table's ids
            share rows, and is -1 otherwise. Ids of a table without an index are rows already.
        absent: int64 ``[tables]``, how many ids of each table have no row of their own.
    """
    rows, absent = find_rows_triton(ids, table_ends, *indexes)
    return rows, absent


@triton_operator("recfx::find_rows_triton")
def find_rows_triton(
    ids: Tensor, table_ends: Tensor, slots: Tensor, side_rows: Tensor, facts: Tensor
) -> tuple[Tensor, Tensor]:
    """Find the rows of all tables' ids, in one launch. The arguments are those of ``find_rows``, contiguous."""
    from recfx.kernels.index.find_rows_gpu_triton import recfx_find_rows_on_gpu
    from recfx.kernels.index.find_rows_triton import recfx_find_rows

    count, tables = ids.numel(), table_ends.numel()
    rows = torch.empty_like(ids)
    if count == 0:
        return rows, table_ends.new_zeros(tables)
    if launch.takes_gpu_forms(ids.device):
        absent = torch.zeros(tables, dtype=torch.int32, device=ids.device)
        facts_of = (table_ends, slots, side_rows, facts, rows, absent, count, tables)
        launch.launch(recfx_find_rows_on_gpu, -(-count // _LANES), ids, *facts_of, BLOCK=_LANES)
        return rows, absent.to(torch.int64)
    lines = -(-count // _LINE)
    programs = launch.programs(ids.device, lines)
    absent = torch.zeros(programs, tables, dtype=torch.int32, device=ids.device)
    per_program = -(-lines // programs) * _LINE
    launch.launch(
        recfx_find_rows, programs, ids, table_ends, slots, side_rows, facts, rows, absent, count, tables, per_program
    )
    return rows, absent.sum(0, dtype=torch.int64)


@find_rows_triton.register_fake
def _fake(ids: Tensor, table_ends: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(table_ends)


def find_rows_reference(ids: Tensor, table_ends: Tensor, indexes: ReadIndexes) -> tuple[Tensor, Tensor]:
    """``find_rows`` in ATen, table by table, on any device; it waits for the device."""
    rows, begin, absent = ids.clone(), 0, []
    for fields, end in zip(indexes.facts.tolist(), table_ends.tolist(), strict=True):
        facts, asked = IndexFacts(*fields), ids[begin:end]
        count = asked.new_zeros(())
        if facts.slot_mask >= 0:
            first = facts.slots_start // 2
            slots = indexes.slots[first : first + facts.slot_mask + 1]
            side_row = indexes.side_rows[facts.side_start : facts.side_start + 1]
            dense = max(0, min(facts.dense_rows - facts.row_begin, facts.rows))
            own_rows = find_rows_in_slots(asked, slots, side_row, dense, facts.row_begin)
            count = (own_rows < 0).sum()
            if facts.share_buckets != 0:
                own_rows = torch.where(own_rows < 0, _shared(asked, facts), own_rows)
            rows[begin:end] = own_rows
        absent.append(count)
        begin = end
    return rows, torch.stack(absent) if absent else ids.new_zeros(0)


def _shared(ids: Tensor, facts: IndexFacts) -> Tensor:
    """The row of the slice that each id reads if it has none of its own; -1 for ids of other slices."""
    buckets, index_rows = abs(facts.share_buckets), facts.table_rows - facts.dense_rows
    # mix64 with a seed is mix64 of the id that was mixed with the seed.
    bucket = torch.remainder(mix64(ids ^ facts.mixed_seed) & 0x7FFFFFFFFFFFFFFF, buckets)
    begin = facts.dense_rows + torch.div(bucket * index_rows, buckets, rounding_mode="floor")
    end = facts.dense_rows + torch.div((bucket + 1) * index_rows, buckets, rounding_mode="floor")
    place = torch.remainder(mix64(ids ^ facts.mixed_next_seed) & 0x7FFFFFFFFFFFFFFF, end - begin)
    place = end - begin - 1 if facts.share_buckets < 0 else place
    rows = begin + place - facts.row_begin
    is_foreign = ((ids >= 0) & (ids < facts.dense_rows)) | (rows < 0) | (rows >= facts.rows)
    return rows.masked_fill(is_foreign, -1)
