"""Which ids of a batch are which table's, and finding the rows of all of them at once."""

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
    """The rows of a batch's ids; reads only.

    Args:
        operators: of the target that has the indexes.
        ids: int64 ``[n]``, on the indexes' device.
        segments: one a table.
        buffers: of each table's index.
        policies: of each table's index.

    Returns:
        rows: int64 ``[n]``, -1 where a table does not hold the id.
        absent: int64 ``[tables]``, how many of those each table has.
    """
    return operators.find_tables(
        ids,
        [segment.begin for segment in segments],
        [segment.end for segment in segments],
        [each.slots for each in buffers],
        [each.side_row for each in buffers],
        [each.lock for each in buffers],
        [policy.own_dense_rows for policy in policies],
        [policy.row_begin for policy in policies],
    )
