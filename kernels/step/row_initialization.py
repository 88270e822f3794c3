"""The initial weights of new rows: a pure function of seed, table name and id.

Column ``j`` of the row of ``id`` is ``low + (high - low) * u`` in float32, cast to the weight's dtype. ``u`` in ``[0,
1)`` is the top 24 bits of ``mix64(mix64(id ^ key) + (j + 1) * 0x9E3779B97F4A7C15)`` over ``2**24``, and ``key`` is
derived from the seed and the table (``initialization_key``). So a row does not depend on when, on which thread or on
which rank its id arrived. ``library.load()`` must have been called before the C++ operator
(``csrc/step/row_initialization.cpp``) is; it returns the same bits as the reference in
``row_initialization_reference.py``.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from recfx.kernels.build import library
from recfx.kernels.index.mix64 import mix64_integer, to_int64


def initialization_key(table_name: str, seed: int) -> int:
    """An int64 that distinguishes the rows of one table and seed from those of any other."""
    digest = hashlib.sha256(table_name.encode(errors="surrogatepass")).digest()
    return to_int64(int.from_bytes(digest[:8], "little")) ^ mix64_integer(seed)


def initialize_rows(
    weight: Tensor, rows: Tensor, ids: Tensor, key: int, low: float, high: float, first_column: int = 0
) -> None:
    """Write the initial rows of ``ids`` into ``weight[rows]``.

    This does not increment the weight's autograd version: rows are initialised during a forward pass, and a new row has
    not been read before, so nothing that autograd has saved changes.

    Args:
        weight: fp32, fp16, bf16 or fp64 ``[table rows, dim]``, on the CPU.
        rows: int64 ``[n]``, all distinct, on the CPU.
        ids: int64 ``[n]``, the id of each row, on the CPU.
        key: from ``initialization_key``.
        low, high: the range.
        first_column: the weight's first column in the table, if the weight is a shard of some of its columns.
    """
    data = weight.data  # shares the memory but not the version counter; detach() would share both
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
