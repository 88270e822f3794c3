"""Lookups of exported files on the CPU: finds ids in frozen indexes and pools stored rows (or not), in one pass.

``recfx::served_lookup`` runs in C++ (``csrc/lookup/served_lookup.cpp``); files of ``export(portable=False)`` call it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build import library
from recfx.kernels.index.buckets import shared_rows
from recfx.kernels.index.slot_table import find_rows_in_slots
from recfx.kernels.lookup.pooled_lookup_reference import pool_bags
from recfx.kernels.lookup.quantized_rows import dequantize_rows, row_bytes


class ServedTable(NamedTuple):
    """One table of a file.

    The rows of all tables are one tensor of bytes, and their slots another one, table by table.
    """

    num_rows: int
    columns: int  # of a stored row
    row_format: int  # 0 float32, 1 float16, 2 codes of 8 bits, 3 of 4 bits (an even number of columns)
    slots: int = 0  # of its index, see slot_table.py; 0: it has none, and its ids are its rows
    side_row: int = -1  # the row of id -1
    dense_rows: int = 0  # an id 0 <= id < dense_rows is its own row
    share_buckets: int = 0  # if an id without a row reads one of its bucket, see shared_rows(); 0: it adds nothing
    seed: int = 0


def served_lookup(
    ids: Tensor,
    offsets: Tensor,
    rows: Tensor,
    tables: list[ServedTable],
    table_of_feature: list[int],
    slots: Tensor,
    mean: bool = False,
    per_sample_weights: Tensor | None = None,
    unpooled: bool = False,
) -> Tensor:
    """Find the row of each id, and pool the rows of every bag, in float32 and in the order of the ids.

    Args:
        ids: int64 ``[n]``.
        offsets: int64 ``[F * B + 1]``: bag ``b`` of feature ``f`` spans ``offsets[f * B + b]`` to
            ``offsets[f * B + b + 1]``.
        rows: uint8 ``[bytes]``, the stored rows of all tables.
        tables: the tables.
        table_of_feature: the table of each of the ``F`` features.
        slots: int64 ``[slots, 2]``, those of all tables.
        mean: divide each sum by the bag's length, in which ids without a row count.
        per_sample_weights: float32 ``[n]``, for sums.
        unpooled: every id is a bag of its own, so that its row stays as it is; all tables have the same columns.

    Returns:
        float32 ``[B, sum of the features' columns]``; ``[n, columns]`` if unpooled, zeros for ids without a row.

    Raises:
        IndexError: an id of a table without an index is not one of its rows.
        RuntimeError: anything else does not fit.
    """
    count, columns, formats, *index = map(list, zip(*tables, strict=True))
    return library.operators().served_lookup(
        ids,
        offsets,
        rows,
        count,
        columns,
        formats,
        table_of_feature,
        slots,
        *index,
        mean,
        per_sample_weights,
        unpooled,
    )


@library.fake("served_lookup")
def _fake(
    ids: Tensor, offsets: Tensor, rows: Tensor, counts: list[int], columns: list[int], formats: list[int],
    table_of_feature: list[int], *rest: object,
) -> Tensor:  # fmt: skip
    if rest[-1] is True:
        return rows.new_empty(ids.numel(), columns[0], dtype=torch.float32)
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    total = sum(columns[table] for table in table_of_feature)
    return rows.new_empty(batch_size, total, dtype=torch.float32)


def served_lookup_reference(
    ids: Tensor,
    offsets: Tensor,
    rows: Tensor,
    tables: list[ServedTable],
    table_of_feature: list[int],
    slots: Tensor,
    mean: bool = False,
    per_sample_weights: Tensor | None = None,
    unpooled: bool = False,
) -> Tensor:
    """``served_lookup`` in ATen, feature by feature: the definition of what files answer."""
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    values = _values(rows, tables)
    slot_tables = slots.split([table.slots for table in tables])
    pooled = []
    for feature, number in enumerate(table_of_feature):
        table = tables[number]
        bags = offsets[feature * batch_size : (feature + 1) * batch_size + 1]
        stretch = slice(int(bags[0]), int(bags[-1]))
        read = _rows_of(ids[stretch], table, slot_tables[number])
        if bool((read < (-1 if table.slots else 0)).any() or (read >= table.num_rows).any()):
            raise IndexError("an id has no row in its table [id_out_of_range]")
        present = read >= 0
        of_rows = values[number][read[present]]
        if per_sample_weights is not None:
            of_rows = of_rows * per_sample_weights[stretch][present].unsqueeze(1)
        if unpooled:
            bags = torch.arange(read.numel() + 1)
        pooled.append(pool_bags(of_rows, present, bags, mean))
    return torch.cat(pooled, dim=0 if unpooled else 1)


def _rows_of(ids: Tensor, table: ServedTable, slots: Tensor) -> Tensor:
    if table.slots == 0:
        return ids
    own_rows = find_rows_in_slots(ids, slots, torch.tensor([table.side_row]), table.dense_rows)
    if table.share_buckets == 0:
        return own_rows
    shared = shared_rows(ids, table.num_rows, table.dense_rows, table.share_buckets, table.seed)
    return torch.where(own_rows < 0, shared, own_rows)


def _values(rows: Tensor, tables: list[ServedTable]) -> list[Tensor]:
    """The rows of each table, float32 ``[count, columns]``."""
    values, begin = [], 0
    for table in tables:
        bits = (32, 16, 8, 4)[table.row_format]
        size = row_bytes(table.columns, bits) if bits <= 8 else table.columns * bits // 8
        stored = rows[begin : begin + table.num_rows * size].view(table.num_rows, size)
        begin += table.num_rows * size
        if bits <= 8:
            values.append(dequantize_rows(stored, table.columns, bits))
        else:
            values.append(stored.clone().view(torch.float32 if bits == 32 else torch.float16).float())
    return values
