"""Lookups of exported files on the CPU: finds ids in frozen indexes and pools stored rows, in one pass.

``served_lookup`` calls the C++ operator of the same name (``torch.ops.recfx.*``, ``csrc/lookup/served_lookup.cpp``),
which files of ``export(portable=False)`` call as well; ``library.load()`` must have been called first.
``served_lookup_reference.py`` implements the same contract.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recfx.kernels.build import library


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
    share_buckets: int = 0  # if an id without a row reads a row of its bucket; 0: it adds nothing
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

    Returns:
        float32 ``[B, sum of the features' columns]``.

    Raises:
        IndexError: an id of a table without an index is not one of its rows.
        RuntimeError: anything else does not fit.
    """
    count, columns, formats, *index = map(list, zip(*tables, strict=True))
    return torch.ops.recfx.served_lookup(
        ids, offsets, rows, count, columns, formats, table_of_feature, slots, *index, mean, per_sample_weights
    )


@library.when_loaded
def _register_fakes() -> None:
    @torch.library.register_fake("recfx::served_lookup")
    def _served_lookup(
        ids: Tensor, offsets: Tensor, rows: Tensor, counts: list[int], columns: list[int], formats: list[int],
        table_of_feature: list[int], *rest: object,
    ) -> Tensor:  # fmt: skip
        batch_size = (offsets.numel() - 1) // len(table_of_feature)
        total = sum(columns[table] for table in table_of_feature)
        return rows.new_empty(batch_size, total, dtype=torch.float32)
