"""``per_sample_weights_triton.py`` as the operator ``recfx::per_sample_weight_gradients_triton``."""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.build import launch, tiling
from recfx.kernels.lookup.per_sample_weights_reference import per_sample_weight_gradients
from recfx.kernels.lookup.table_layout import layout_of, starts


@torch.library.custom_op("recfx::per_sample_weight_gradients_triton", mutates_args=())
def per_sample_weight_gradients_triton(
    rows: Tensor, offsets: Tensor, gradients: Tensor, weights: list[Tensor], table_of_feature: list[int]
) -> Tensor:
    """The gradient of the per-sample weights of a pooled lookup (SUM).

    Args:
        rows, offsets, weights, table_of_feature: as in ``recfx::pooled_lookup_triton``.
        gradients: contiguous ``[B, sum of the features' dims]``, of the lookup's output.

    Returns:
        float32 ``[n]``; 0 for a row of -1.
    """
    if launch.simulated(rows.device):
        return per_sample_weight_gradients(rows, offsets, gradients, weights, table_of_feature)
    from recfx.kernels.lookup.per_sample_weights_triton import recfx_per_sample_weight_gradients

    layout = layout_of(weights, table_of_feature)
    bags = offsets.numel() - 1
    found = torch.zeros(rows.numel(), dtype=torch.float32, device=rows.device)
    if bags == 0 or rows.numel() == 0:
        return found
    launch.launch(
        recfx_per_sample_weight_gradients,
        launch.programs(rows.device, bags),
        rows,
        offsets,
        gradients,
        layout.first_columns,
        weights[0],
        starts(weights, table_of_feature),
        found,
        bags,
        bags // len(table_of_feature),
        layout.columns,
        BLOCK_D=tiling.block_of(layout.largest_dim),
    )
    return found


@per_sample_weight_gradients_triton.register_fake
def _(rows: Tensor, offsets: Tensor, gradients: Tensor, weights: list[Tensor], table_of_feature: list[int]) -> Tensor:
    return rows.new_empty(rows.numel(), dtype=torch.float32)
