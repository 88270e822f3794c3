"""Pooled lookups of several tables at once on the CPU, from rows or straight from raw ids.

Each function calls the C++ operator of the same name (``torch.ops.recfx.*``, ``csrc/lookup/pooled_lookup.cpp``);
``library.load()`` must have been called first. ``pooled_lookup_reference.py`` implements the same contracts.

All of them use the same conventions. A lookup has ``F`` features, in column order; feature ``f`` reads table
``table_of_feature[f]``, and its bag ``b`` spans ``offsets[f * B + b]`` to ``offsets[f * B + b + 1]``. Weights are
contiguous ``[rows, dim]`` of any width, all float32, all float16 or all bfloat16. A bag is the sum of its rows,
multiplied by ``per_sample_weights`` (float32 ``[n]``) if given, computed in float32 and in the order of the ids:
results do not depend on the number of threads. A row of -1 adds nothing. All other rows must be in range, which is not
checked; anything else that is wrong raises a RuntimeError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.build import library
from recfx.kernels.index.index_buffers import IndexView


def pooled_lookup(
    rows: Tensor,
    offsets: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    mean: bool = False,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Pool the rows of every bag.

    Args:
        rows: int64 ``[n]``.
        offsets: int64 ``[F * B + 1]``.
        weights, table_of_feature, per_sample_weights: see above.
        mean: divide each sum by the bag's length; not allowed with ``per_sample_weights``.

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
    keep_rows: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the row of each id and pool the rows, in one pass. Only reads; waits for writers of the indexes.

    Args:
        ids: int64 ``[n]``; for tables without an index, these are rows.
        offsets, weights, table_of_feature, per_sample_weights: see above.
        indexes: one per table.
        keep_rows: whether to return the rows.

    Returns:
        pooled: float32 ``[B, sum of the features' dims]``.
        rows: int64 ``[n]``, -1 if an id has no row and its table shares none, or if an id is in no bag; empty without
            ``keep_rows``.
        absent: int64 ``[tables]``, the number of ids per table that have no row of their own.
    """
    slot_groups, side_rows, dense_rows, share_buckets, seeds, locks, table_rows, row_begins = map(
        list, zip(*indexes, strict=True)
    )
    lookup = (ids, offsets, weights, table_of_feature)
    views = (slot_groups, side_rows, dense_rows, share_buckets, seeds, table_rows, row_begins)
    held = [lock for lock in locks if lock is not None]
    return torch.ops.recfx.find_and_pool(*lookup, *views, held, per_sample_weights, keep_rows)


def pool_again_(
    pooled: Tensor,
    rows: Tensor,
    changed: Tensor,
    offsets: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    per_sample_weights: Tensor | None = None,
) -> None:
    """Recompute the bags that contain a changed row: ``pooled`` then equals ``pooled_lookup`` of ``rows`` bit for bit.

    Args:
        pooled: float32 ``[B, sum of the features' dims]``, contiguous: the sums of the old rows; updated in place.
        rows: int64 ``[n]``, the new rows.
        changed: bool ``[n]``, true where a new row differs from the old one.
        offsets, weights, table_of_feature, per_sample_weights: see above.
    """
    torch.ops.recfx.pool_again_(pooled, rows, changed, offsets, weights, table_of_feature, per_sample_weights)


def pooled_like(offsets: Tensor, weights: list[Tensor], table_of_feature: list[int]) -> Tensor:
    """The output of a lookup, without numbers."""
    columns = sum(weights[table].shape[1] for table in table_of_feature)
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    return weights[0].new_empty(batch_size, columns, dtype=torch.float32)


@library.when_loaded
def _register_fakes() -> None:
    @torch.library.register_fake("recfx::pooled_lookup")
    def _pooled_lookup(
        rows: Tensor, offsets: Tensor, weights: list[Tensor], table_of_feature: list[int], *rest: object
    ) -> Tensor:
        return pooled_like(offsets, weights, table_of_feature)

    @torch.library.register_fake("recfx::find_and_pool")
    def _find_and_pool(
        ids: Tensor,
        offsets: Tensor,
        weights: list[Tensor],
        table_of_feature: list[int],
        slot_groups: list[Tensor],
        side_rows: list[Tensor],
        dense_rows: list[int],
        share_buckets: list[int],
        seeds: list[int],
        table_rows: list[int],
        row_begins: list[int],
        locks: list[Tensor],
        per_sample_weights: Tensor | None,
        keep_rows: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.empty_like(ids, memory_format=torch.contiguous_format) if keep_rows else ids.new_empty(0)
        return pooled_like(offsets, weights, table_of_feature), rows, ids.new_empty(len(weights))

    @torch.library.register_fake("recfx::pool_again_")
    def _pool_again(*arguments: object) -> None:
        return None
