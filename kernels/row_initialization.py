"""Initial weights of new rows: a pure function of seed, table name and id.

Column ``j`` of the row of ``id`` is ``low + (high - low) * u`` in float32, cast to the weight's dtype. ``u`` in
``[0, 1)`` is the top 24 bits of ``mix64(mix64(id ^ key) + (j + 1) * 0x9E3779B97F4A7C15)`` over ``2**24``, and ``key``
stands for the seed and the table (``initialization_key``). So a row does not depend on when, on which thread or on
which rank its id arrived. The C++ operator (``csrc/row_initialization.cpp``), which has to be loaded
(``library.load()``), gives the bits that the reference in ``row_initialization_reference.py`` gives.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from . import library
from .mix64 import mix64_integer, to_int64


def initialization_key(table_name: str, seed: int) -> int:
    """What distinguishes the rows of one table and seed from another's: an int64."""
    digest = hashlib.sha256(table_name.encode()).digest()
    return to_int64(int.from_bytes(digest[:8], "little")) ^ mix64_integer(seed)


def initialize_rows(
    weight: Tensor, rows: Tensor, ids: Tensor, key: int, low: float, high: float, first_column: int = 0
) -> None:
    """Write the initial rows of ``ids`` into ``weight[rows]``.

    The weight's autograd version is not bumped: rows are initialised inside a forward pass, and a row that is new was
    not read before, so that nothing that autograd has saved changes.

    Args:
        weight: fp32, fp16, bf16 or fp64 ``[table rows, dim]``, on the CPU.
        rows: int64 ``[n]``, all different, on the CPU.
        ids: int64 ``[n]``, the id of each row, on the CPU.
        key: from ``initialization_key``.
        low, high: the range.
        first_column: of the table, where the weight is a shard of some of its columns.
    """
    data = weight.data  # shares the memory, not the version counter; detach() would share both
    if data.stride(1) == 1:
        torch.ops.recfx.init_rows_(data, rows, ids, key, low, high, first_column)
    else:
        values = data.new_empty(rows.numel(), data.shape[1])
        torch.ops.recfx.init_rows_(values, torch.arange(rows.numel()), ids, key, low, high, first_column)
        data.index_copy_(0, rows, values)


@library.when_loaded
def _register_fakes() -> None:
    @torch.library.register_fake("recfx::init_rows_")
    def _init_rows(weight: Tensor, rows: Tensor, ids: Tensor, *rest: object) -> None:
        return None
