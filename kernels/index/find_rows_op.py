"""The kernel in ``find_rows_triton.py`` as the operator ``recfx::find_rows_triton``: the contract of ``find_rows.py``.

The host does not wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.build import launch
from recfx.kernels.index import find_rows_reference
from recfx.kernels.index.find_rows import ReadIndexes

_LINE = 8  # int64 values of one cache line, into which one program writes


def find_rows(ids: Tensor, table_ends: Tensor, indexes: ReadIndexes) -> tuple[Tensor, Tensor]:
    """The contract of the family, for tensors on any one device that has the kernel."""
    found: tuple[Tensor, Tensor] = find_rows_triton(ids, table_ends, *indexes)
    return found


@torch.library.custom_op("recfx::find_rows_triton", mutates_args=())
def find_rows_triton(
    ids: Tensor, table_ends: Tensor, slots: Tensor, side_rows: Tensor, facts: Tensor
) -> tuple[Tensor, Tensor]:
    """Find the rows of all tables' ids, in one launch. The arguments are those of the family, contiguous."""
    if launch.simulated(ids.device):
        of_host = ReadIndexes(slots.cpu(), side_rows.cpu(), facts.cpu())
        rows, absent = find_rows_reference.find_rows(ids.cpu(), table_ends.cpu(), of_host)
        return rows.to(ids.device), absent.to(ids.device)
    from recfx.kernels.index.find_rows_triton import recfx_find_rows

    count, tables = ids.numel(), table_ends.numel()
    rows = torch.empty_like(ids)
    if count == 0:
        return rows, table_ends.new_zeros(tables)
    lines = -(-count // _LINE)
    programs = launch.programs(ids.device, lines)
    absent = torch.zeros(programs, tables, dtype=torch.int32, device=ids.device)
    per_program = -(-lines // programs) * _LINE
    launch.launch(
        recfx_find_rows, programs, ids, table_ends, slots, side_rows, facts, rows, absent, count, tables, per_program
    )
    return rows, absent.sum(0, dtype=torch.int64)


@find_rows_triton.register_fake
def _(ids: Tensor, table_ends: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(table_ends)
