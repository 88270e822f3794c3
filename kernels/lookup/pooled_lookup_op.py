"""``pooled_lookup_triton.py`` as the operator ``recfx::pooled_lookup_triton``: the contract of ``pooled_lookup``."""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.build import launch, tiling
from recfx.kernels.lookup.pooled_lookup import pooled_like
from recfx.kernels.lookup.pooled_lookup_reference import pooled_lookup
from recfx.kernels.lookup.table_layout import layout_of, starts


@torch.library.custom_op("recfx::pooled_lookup_triton", mutates_args=())
def pooled_lookup_triton(
    rows: Tensor,
    offsets: Tensor,
    weights: list[Tensor],
    table_of_feature: list[int],
    mean: bool,
    per_sample_weights: Tensor | None,
) -> Tensor:
    """Pool the rows of every bag, in one launch.

    Args:
        rows: int64 ``[n]``; -1 adds nothing.
        offsets: int64 ``[F * B + 1]``.
        weights: contiguous ``[rows, dim]``, all float32, all float16 or all bfloat16, on one device.
        table_of_feature: the position of each feature's table.
        mean: divide each sum by the bag's length, which counts rows of -1.
        per_sample_weights: float32 ``[n]``, or None.

    Returns:
        float32 ``[B, sum of the features' dims]``, computed in float32 in the order of the rows.
    """
    if launch.simulated(rows.device):
        return pooled_lookup(rows, offsets, weights, table_of_feature, mean, per_sample_weights)
    from recfx.kernels.lookup.pooled_lookup_triton import recfx_pooled_lookup

    layout = layout_of(weights, table_of_feature)
    bags = offsets.numel() - 1
    batch_size = bags // len(table_of_feature)
    pooled = torch.empty(batch_size, layout.columns, dtype=torch.float32, device=rows.device)
    if bags == 0:
        return pooled
    launch.launch(
        recfx_pooled_lookup,
        launch.programs(rows.device, bags),
        rows,
        offsets,
        pooled if per_sample_weights is None else per_sample_weights,  # not read
        weights[0],
        starts(weights, table_of_feature),
        layout.first_columns,
        pooled,
        bags,
        batch_size,
        layout.columns,
        BLOCK_D=tiling.block_of(layout.largest_dim),
        WEIGHTED=per_sample_weights is not None,
        MEAN=mean,
    )
    return pooled


@pooled_lookup_triton.register_fake
def _(rows: Tensor, offsets: Tensor, weights: list[Tensor], table_of_feature: list[int], *rest: object) -> Tensor:
    return pooled_like(offsets, weights, table_of_feature)
