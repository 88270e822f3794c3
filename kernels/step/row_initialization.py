"""The initial weights of new rows: a pure function of seed, table name and id.

Column ``j`` of the row of ``id`` is ``low + (high - low) * u`` in float32, cast to the weight's dtype. ``u`` in
``[0, 1)`` is the top 24 bits of ``mix64(mix64(id ^ key) + (j + 1) * 0x9E3779B97F4A7C15)`` over ``2**24``, and ``key``
is derived from the seed and the table (``initialization_key``). So a row does not depend on when, on which thread or
on which rank its id arrived.

``recfx::init_rows_`` runs in C++ where all tensors are on the CPU (``csrc/step/row_initialization.cpp``), and in ATen
everywhere else; both write the same bits.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from recfx.kernels.build import library
from recfx.kernels.index.mix64 import mix64, mix64_integer, to_int64


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
        weight: fp32, fp16, bf16 or fp64 ``[table rows, dim]``, on any device.
        rows: int64 ``[n]``, all distinct.
        ids: int64 ``[n]``, the id of each row.
        key: from ``initialization_key``.
        low, high: the range.
        first_column: the weight's first column in the table, if the weight is a shard of some of its columns.
    """
    data = weight.data  # shares the memory but not the version counter; detach() would share both
    if data.device.type != "cpu" or data.stride(1) == 1:
        library.operators().init_rows_(data, rows, ids, key, low, high, first_column)
    else:
        values = data.new_empty(rows.numel(), data.shape[1])
        library.operators().init_rows_(values, torch.arange(rows.numel()), ids, key, low, high, first_column)
        data.index_copy_(0, rows, values)


@library.reference("init_rows_")
def init_rows_reference_(
    weight: Tensor, rows: Tensor, ids: Tensor, key: int, low: float, high: float, first_column: int = 0
) -> None:
    """The operator in ATen; the tensors may be on different devices and have any strides."""
    values = initial_rows(ids.to(weight.device), weight.size(1), key, low, high, first_column)
    weight.index_copy_(0, rows.to(weight.device), values.to(weight.dtype))


def initial_rows(ids: Tensor, dim: int, key: int, low: float, high: float, first_column: int = 0) -> Tensor:
    """The initial rows of these ids, float32 ``[n, dim]`` on their device; arguments as above. Scriptable."""
    column = torch.arange(first_column + 1, first_column + dim + 1, dtype=torch.int64, device=ids.device)
    bits = mix64(mix64(ids ^ key).unsqueeze(1) + column * -7046029254386353131)  # 0x9E3779B97F4A7C15
    uniform = ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 5.9604644775390625e-08  # 2 ** -24, exact
    # The ends are rounded to float32 before they are subtracted, as in C++.
    ends = torch.tensor([low, high], dtype=torch.float32, device=ids.device)
    return uniform * (ends[1] - ends[0]) + ends[0]
