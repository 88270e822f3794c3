"""Which ids of a batch belong to which table, and how to find the rows of all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from recfx.ir.tables import TableSpec
from recfx.kernels.host import HashIndexOperators
from recfx.kernels.index_buffers import IndexBuffers, IndexPolicy


class Segment(NamedTuple):
    """The ids of one table in a batch: ``values[begin:end]``."""

    table: TableSpec
    begin: int
    end: int


def find_rows(
    operators: HashIndexOperators,
    ids: torch.Tensor,
    segments: Sequence[Segment],
    buffers: Sequence[IndexBuffers],
    policies: Sequence[IndexPolicy],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the rows of a batch's ids; only reads.

    Args:
        operators: those of the target that has the indexes.
        ids: int64 ``[n]``, on the indexes' device.
        segments: one per table.
        buffers: those of each table's index.
        policies: those of each table's index.

    Returns:
        rows: int64 ``[n]``, -1 if a table does not hold the id.
        absent: int64 ``[tables]``, the number of such ids per table.
    """
    return operators.find_tables(
        ids,
        [segment.begin for segment in segments],
        [segment.end for segment in segments],
        [each.slot_groups for each in buffers],
        [each.side_row for each in buffers],
        [each.lock for each in buffers],
        [policy.own_dense_rows for policy in policies],
        [policy.row_begin for policy in policies],
    )
