"""Lookups of several tables at once, pooled or not, from rows or straight from raw ids.

``recfx::pooled_lookup``, ``find_and_pool`` and ``pool_again_`` run in C++ (``csrc/lookup/pooled_lookup.cpp``), and
``recfx::pooled_lookup_triton`` by the kernels in ``pooled_lookup_triton.py`` and ``gather_rows_triton.py``;
``pooled_lookup_reference.py`` has it in ATen.

All of them use the same conventions. A lookup has ``F`` features, in column order; feature ``f`` reads table
``table_of_feature[f]``, and its bag ``b`` spans ``offsets[f * B + b]`` to ``offsets[f * B + b + 1]``. Weights are
contiguous ``[rows, dim]`` of any width, all float32, all float16 or all bfloat16. A bag is the sum of its rows,
multiplied by ``per_sample_weights`` (float32 ``[n]``) if given, computed in float32 and in the order of the ids:
results do not depend on the number of threads. A row of -1 adds nothing. All other rows must be in range, which is not
checked; anything else that is wrong raises a RuntimeError.

``unpooled`` lookups copy rows instead: each id is a bag of its own, and has a row of the output, in the order of the
ids. A row of -1 gives zeros. ``B`` is 1 then: ``offsets``, ``[F + 1]``, from 0 to ``n``, says where the ids of each
feature begin. There are no ``per_sample_weights``.

``outputs`` are one tensor, float32 ``[B, sum of the features' dims]``; of ``unpooled`` lookups, one for each feature,
``[ids of the feature, dim]``: the system takes longer to provide large tensors than to fill them, and takes back those
that are larger than 32 MiB when they are freed. In Triton, they are one tensor, ``[n, dim]``, and tables have one dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.build import launch, library, tiling
from recfx.kernels.build.plain_arguments import triton_operator
from recfx.kernels.index.index_buffers import IndexView
from recfx.kernels.lookup import pooled_lookup_reference
from recfx.kernels.lookup.table_layout import layout_of, starts


def pooled_lookup(
    rows: Tensor,
    offsets: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    mean: bool = False,
    per_sample_weights: Tensor | None = None,
    unpooled: bool = False,
) -> list[Tensor]:
    """Pool the rows of every bag, or copy them.

    Args:
        rows: int64 ``[n]``.
        offsets: int64 ``[F * B + 1]``.
        weights, table_of_feature, per_sample_weights, unpooled: see above.
        mean: divide each sum by the bag's length; allowed neither with ``per_sample_weights`` nor if ``unpooled``.

    Returns:
        ``outputs``, see above.
    """
    return library.operators().pooled_lookup(
        rows, offsets, weights, table_of_feature, mean, per_sample_weights, unpooled
    )


def find_and_pool(
    ids: Tensor,
    offsets: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    indexes: list[IndexView],
    per_sample_weights: Tensor | None = None,
    keep_rows: bool = True,
    unpooled: bool = False,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Find the row of each id and pool the rows, in one pass. Only reads; waits for writers of the indexes.

    Args:
        ids: int64 ``[n]``; for tables without an index, these are rows.
        offsets, weights, table_of_feature, per_sample_weights, unpooled: see above.
        indexes: one per table.
        keep_rows: whether to return the rows.

    Returns:
        outputs: see above.
        rows: int64 ``[n]``, -1 if an id has no row and its table shares none, or if an id is in no bag; empty without
            ``keep_rows``.
        absent: int64 ``[tables]``, the number of ids per table that have no row of their own.
    """
    slot_groups, side_rows, dense_rows, share_buckets, seeds, locks, table_rows, row_begins = map(
        list, zip(*indexes, strict=True)
    )
    lookup = (ids, offsets, weights, table_of_feature)
    views = (slot_groups, side_rows, dense_rows, share_buckets, seeds, table_rows, row_begins)
    own_locks = [lock for lock in locks if lock is not None]
    return library.operators().find_and_pool(*lookup, *views, own_locks, per_sample_weights, keep_rows, unpooled)


def pool_again_(
    outputs: list[Tensor],
    rows: Tensor,
    changed: Tensor,
    offsets: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    per_sample_weights: Tensor | None = None,
    unpooled: bool = False,
) -> None:
    """Recompute the bags that contain a changed row: ``outputs`` then equal ``pooled_lookup`` of ``rows`` bit for bit.

    Args:
        outputs: contiguous, what ``pooled_lookup`` returned of the old rows; updated in place.
        rows: int64 ``[n]``, the new rows.
        changed: bool ``[n]``, true where a new row differs from the old one.
        offsets, weights, table_of_feature, per_sample_weights, unpooled: see above.
    """
    library.operators().pool_again_(
        outputs, rows, changed, offsets, weights, table_of_feature, per_sample_weights, unpooled
    )


def pooled_like(offsets: Tensor, weights: list[Tensor], table_of_feature: list[int]) -> Tensor:
    """The output of a pooled lookup, without numbers."""
    columns = sum(weights[table].shape[1] for table in table_of_feature)
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    return weights[0].new_empty(batch_size, columns, dtype=torch.float32)


@library.fake("pooled_lookup")
def _pooled_lookup(
    rows: Tensor, offsets: Tensor, weights: list[Tensor], table_of_feature: list[int], *rest: object
) -> list[Tensor]:
    return _outputs_like(offsets, weights, table_of_feature, unpooled=len(rest) > 2 and bool(rest[2]))


def _outputs_like(offsets: Tensor, weights: list[Tensor], table_of_feature: list[int], unpooled: bool) -> list[Tensor]:
    if not unpooled:
        return [pooled_like(offsets, weights, table_of_feature)]
    read = [weights[table] for table in table_of_feature]
    count = torch.library.get_ctx().new_dynamic_size  # how many ids a feature has depends on data
    return [weight.new_empty(count(), weight.shape[1], dtype=torch.float32) for weight in read]


@library.fake("find_and_pool")
def _find_and_pool(
    ids: Tensor, offsets: Tensor, weights: list[Tensor], table_of_feature: list[int], *rest: object
) -> tuple[list[Tensor], Tensor, Tensor]:
    keep_rows, unpooled = len(rest) < 10 or bool(rest[9]), len(rest) > 10 and bool(rest[10])  # the last arguments
    rows = torch.empty_like(ids, memory_format=torch.contiguous_format) if keep_rows else ids.new_empty(0)
    outputs = _outputs_like(offsets, weights, table_of_feature, unpooled)
    return outputs, rows, ids.new_empty(len(weights))


@triton_operator("recfx::pooled_lookup_triton")
def pooled_lookup_triton(
    rows: Tensor,
    offsets: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    mean: bool,
    per_sample_weights: Tensor | None,
    unpooled: bool = False,
) -> Tensor:
    """``pooled_lookup`` by the kernel, in one launch, with one output; all tensors are on one device.

    On the CPU without Triton's interpreter, where files for devices run as well, ATen computes.
    """
    if rows.device.type == "cpu" and not launch.is_interpreted():
        how = (table_of_feature, mean, per_sample_weights, unpooled)
        return pooled_lookup_reference.pooled_lookup(rows, offsets, weights, *how)
    from recfx.kernels.lookup.lookup_gpu_triton import recfx_pooled_lookup_on_gpu
    from recfx.kernels.lookup.pooled_lookup_triton import recfx_pooled_lookup

    if unpooled:
        return _gather_rows(rows, offsets, weights, table_of_feature)
    layout = layout_of(weights, table_of_feature)
    bags = offsets.numel() - 1
    batch_size = bags // len(table_of_feature)
    pooled = torch.empty(batch_size, layout.columns, dtype=torch.float32, device=rows.device)
    if bags == 0:
        return pooled
    block = tiling.block_of(layout.largest_dim)
    scales = pooled if per_sample_weights is None else per_sample_weights  # not read
    tables = weights[0], starts(weights, table_of_feature), layout.first_columns
    form = {"BLOCK_D": block, "WEIGHTED": per_sample_weights is not None, "MEAN": mean}
    sizes = bags, batch_size, layout.columns
    if launch.takes_gpu_forms(rows.device):
        form["BAGS"] = at_once = tiling.bags_on_gpu(block, weights[0].element_size())
        kernel, programs, outputs = recfx_pooled_lookup_on_gpu, -(-bags // at_once), [pooled]
    else:
        form["ROWS"] = launch.lookup_rows(rows.device, block, "recfx_pooled_lookup")
        kernel, programs = recfx_pooled_lookup, launch.programs(rows.device, bags, "recfx_pooled_lookup")
        outputs = [pooled] * 3
    launch.launch(kernel, programs, rows, offsets, scales, *tables, *outputs, *sizes, **form)
    return pooled


def _gather_rows(rows: Tensor, borders: Tensor, weights: list[Tensor], table_of_feature: list[int]) -> Tensor:
    from recfx.kernels.lookup.gather_rows_triton import recfx_gather_rows
    from recfx.kernels.lookup.lookup_gpu_triton import recfx_gather_rows_on_gpu

    ids, dim = rows.numel(), weights[0].shape[1]
    gathered = torch.empty(ids, dim, dtype=torch.float32, device=rows.device)
    if ids == 0:
        return gathered
    form, tables = {"BLOCK_D": tiling.block_of(dim)}, (weights[0], starts(weights, table_of_feature))
    kernel, programs, outputs = recfx_gather_rows, launch.programs(rows.device, ids), [gathered] * 8
    if launch.takes_gpu_forms(rows.device):
        form["BAGS"] = at_once = tiling.bags_on_gpu(form["BLOCK_D"], weights[0].element_size())
        kernel, programs, outputs = recfx_gather_rows_on_gpu, -(-ids // at_once), [gathered]
    launch.launch(kernel, programs, rows, borders, *tables, *outputs, ids, len(table_of_feature), dim, **form)
    return gathered


@pooled_lookup_triton.register_fake
def _pooled_lookup_triton(
    rows: Tensor, offsets: Tensor, weights: list[Tensor], table_of_feature: list[int], *rest: object
) -> Tensor:
    if len(rest) > 2 and rest[2]:  # unpooled
        return weights[0].new_empty(rows.numel(), weights[0].shape[1], dtype=torch.float32)
    return pooled_like(offsets, weights, table_of_feature)
