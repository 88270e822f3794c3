"""Lookups of exported files on the CPU: finds ids in frozen indexes and pools stored rows (or not), in one pass.

``recfx::served_lookup`` runs in C++ (``csrc/lookup/served_lookup.cpp``); files of ``export(portable=False)`` call it,
with what ``export(portable=True)`` does in ATen. ``ids`` are int64 ``[n]``; bag ``b`` of feature ``f`` spans
``offsets[f * B + b]`` to ``offsets[f * B + b + 1]``. The rows of all tables are one tensor of bytes, and their slots
(``slot_table.py``) another one, table by table. Of each table, the operator takes the number of rows, the columns of a
stored row, its format (0 float32, 1 float16, 2 codes of 8 bits, 3 of 4 bits), and of its index: the number of slots (0:
its ids are its rows), the row of id -1, ``dense_rows``, ``share_buckets`` (see ``buckets.shared_rows``; 0: an id
without a row adds nothing) and the seed. Sums are float32 ``[B, sum of the features' columns]``, in the order of the
ids; a mean is divided by the bag's length, in which ids without a row count. If ``unpooled``, the output is ``[n,
columns]``, zeros for ids without a row. An id of a table without an index that is none of its rows is an IndexError,
anything else that does not fit a RuntimeError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.build import library


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
