"""Pooled lookups of several tables at once on the CPU, from rows or straight from raw ids.

Each function calls the C++ operator of its name (``torch.ops.recfx.*``, ``csrc/pooled_lookup.cpp``), which has to be
loaded (``library.load()``). The references of the same contract are in ``pooled_lookup_reference.py``.

What they share: a lookup has ``F`` features, in column order; feature ``f`` reads table ``table_of_feature[f]``, and
its bag ``b`` is ``offsets[f * B + b]`` to ``offsets[f * B + b + 1]``. Weights are contiguous ``[rows, dim]``, all
float32 or all float16, of any widths. A bag is the sum of its rows, times ``per_sample_weights`` (float32 ``[n]``) if
given, in float32 and in the order of the ids: results do not depend on the number of threads. A row of -1 adds nothing.
Rows must otherwise be in range, which is not checked; everything else is, with RuntimeError.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import library


class IndexView(NamedTuple):
    """What finding needs to know of a table's index."""

    slots: Tensor  # int64 [slots, 2], see slot_table.py; [0, 2]: no index, the table's ids are its rows
    side_row: Tensor  # int64 [1]: the row of id -1
    dense_rows: int  # of the table: ids 0 <= id < dense_rows are their own row
    share_buckets: int  # of the table, where an id without a row reads a row of its bucket; 0: it adds nothing
    seed: int  # of the index
    lock: Tensor | None = None  # of the index; None where nobody writes it any more
    table_rows: int = 0  # of the table, where the weight and the index are a slice of it; 0: they are the whole table
    row_begin: int = 0  # the table's row with which the slice begins; ids of other slices have no row

    @classmethod
    def none(cls) -> IndexView:
        """The view of a table without index."""
        empty = torch.empty(0, 2, dtype=torch.int64, device="cpu")
        return cls(empty, torch.empty(1, dtype=torch.int64, device="cpu"), 0, 0, 0)


def pooled_lookup(
    rows: Tensor,
    offsets: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    mean: bool = False,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Pool rows.

    Args:
        rows: int64 ``[n]``.
        offsets: int64 ``[F * B + 1]``.
        weights, table_of_feature, per_sample_weights: see above.
        mean: divide each sum by the bag's length. Not with ``per_sample_weights``.

    Returns:
        float32 ``[B, sum of the features' dims]``.
    """
    return torch.ops.recfx.pooled_lookup(rows, offsets, weights, table_of_feature, mean, per_sample_weights)


def find_and_pool(
    ids: Tensor,
    offsets: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    indexes: list[IndexView],
    per_sample_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the row of each id and pool the rows, in one pass. Reads only; waits for writers of the indexes.

    Args:
        ids: int64 ``[n]``; of tables without index, rows.
        offsets, weights, table_of_feature, per_sample_weights: see above.
        indexes: one a table.

    Returns:
        pooled: float32 ``[B, sum of the features' dims]``.
        rows: int64 ``[n]``, -1 where an id has no row and its table shares none, and where an id is in no bag.
        absent: int64 ``[tables]``, how many ids of each table have no row of their own.
    """
    slots, side_rows, dense_rows, share_buckets, seeds, locks, table_rows, row_begins = map(
        list, zip(*indexes, strict=True)
    )
    lookup = (ids, offsets, weights, table_of_feature)
    views = (slots, side_rows, dense_rows, share_buckets, seeds, table_rows, row_begins)
    held = [lock for lock in locks if lock is not None]
    return torch.ops.recfx.find_and_pool(*lookup, *views, held, per_sample_weights)


def pool_again_(
    pooled: Tensor,
    rows: Tensor,
    changed: Tensor,
    offsets: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    per_sample_weights: Tensor | None = None,
) -> None:
    """Sum those bags anew that hold a changed row: ``pooled`` is then, bit for bit, what these rows pool to.

    Args:
        pooled: float32 ``[B, sum of the features' dims]``, contiguous: the sums of the rows before; updated in place.
        rows: int64 ``[n]`` as they are now.
        changed: bool ``[n]``, where they differ from before.
        offsets, weights, table_of_feature, per_sample_weights: see above.
    """
    torch.ops.recfx.pool_again_(pooled, rows, changed, offsets, weights, table_of_feature, per_sample_weights)


@library.when_loaded
def _register_fakes() -> None:
    def pooled_like(offsets: Tensor, weights: list[Tensor], table_of_feature: list[int]) -> Tensor:
        columns = sum(weights[table].shape[1] for table in table_of_feature)
        batch_size = (offsets.numel() - 1) // len(table_of_feature)
        return weights[0].new_empty(batch_size, columns, dtype=torch.float32)

    @torch.library.register_fake("recfx::pooled_lookup")
    def _pooled_lookup(
        rows: Tensor, offsets: Tensor, weights: list[Tensor], table_of_feature: list[int], *rest: object
    ) -> Tensor:
        return pooled_like(offsets, weights, table_of_feature)

    @torch.library.register_fake("recfx::find_and_pool")
    def _find_and_pool(
        ids: Tensor, offsets: Tensor, weights: list[Tensor], table_of_feature: list[int], *rest: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.empty_like(ids, memory_format=torch.contiguous_format)
        return pooled_like(offsets, weights, table_of_feature), rows, ids.new_empty(len(weights))

    @torch.library.register_fake("recfx::pool_again_")
    def _pool_again(*arguments: object) -> None:
        return None
