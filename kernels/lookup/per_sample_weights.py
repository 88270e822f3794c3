"""The gradient of pooled lookups with respect to their per-sample weights.

``recfx::per_sample_weight_gradients`` runs in C++ (``csrc/lookup/per_sample_weights.cpp``), and
``recfx::per_sample_weight_gradients_triton`` by the kernel in ``per_sample_weights_triton.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.build import launch, library, tiling
from recfx.kernels.build.plain_arguments import triton_operator
from recfx.kernels.lookup.table_layout import layout_of, starts

_KERNEL = "recfx_per_sample_weight_gradients"


def per_sample_weight_gradients(
    rows: Tensor, offsets: Tensor, gradients: Tensor, weights: list[Tensor], table_of_feature: list[int]
) -> Tensor:
    """For each position, the gradient of its bag times its row (SUM). The result depends on no number of threads.

    Args:
        rows, offsets, weights, table_of_feature: as for ``pooled_lookup``.
        gradients: contiguous float32 ``[B, sum of the features' dims]``, of the lookup's output.

    Returns:
        float32 ``[n]``; 0 for a row of -1, and for positions in no bag.

    Raises:
        IndexError: a row is beyond the end of its table.
        RuntimeError: another argument is wrong.
    """
    return library.operators().per_sample_weight_gradients(rows, offsets, gradients, weights, table_of_feature)


@library.fake("per_sample_weight_gradients")
def _fake(rows: Tensor, *arguments: object) -> Tensor:
    return rows.new_empty(rows.numel(), dtype=torch.float32)


@triton_operator("recfx::per_sample_weight_gradients_triton")
def per_sample_weight_gradients_triton(
    rows: Tensor, offsets: Tensor, gradients: Tensor, weights: list[Tensor], table_of_feature: list[int]
) -> Tensor:
    """``per_sample_weight_gradients`` by the kernel, in one launch; all tensors are on one device."""
    from recfx.kernels.lookup.lookup_gpu_triton import recfx_per_sample_weight_gradients_on_gpu
    from recfx.kernels.lookup.per_sample_weights_triton import recfx_per_sample_weight_gradients

    layout = layout_of(weights, table_of_feature)
    bags = offsets.numel() - 1
    of_positions = torch.zeros(rows.numel(), dtype=torch.float32, device=rows.device)
    if bags == 0 or rows.numel() == 0:
        return of_positions
    kernel, programs = recfx_per_sample_weight_gradients, launch.programs(rows.device, bags, _KERNEL)
    form = {"BLOCK_D": tiling.block_of(layout.largest_dim)}
    if launch.takes_gpu_forms(rows.device):
        form["BAGS"] = tiling.bags_on_gpu(form["BLOCK_D"], weights[0].element_size())
        kernel, programs = recfx_per_sample_weight_gradients_on_gpu, -(-bags // form["BAGS"])
    launch.launch(
        kernel, programs, rows, offsets, gradients,
        layout.first_columns, weights[0], starts(weights, table_of_feature), of_positions,
        bags, bags // len(table_of_feature), layout.columns, **form,
    )  # fmt: skip
    return of_positions


per_sample_weight_gradients_triton.register_fake(_fake)


def per_sample_weight_gradients_reference(
    rows: Tensor, offsets: Tensor, gradients: Tensor, weights: list[Tensor], table_of_feature: list[int]
) -> Tensor:
    """``per_sample_weight_gradients`` in ATen."""
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    of_positions = torch.zeros(rows.numel(), dtype=torch.float32, device=rows.device)
    column = 0
    for feature, table in enumerate(table_of_feature):
        weight = weights[table]
        bags = offsets[feature * batch_size : (feature + 1) * batch_size + 1]
        begin, end = int(bags[0]), int(bags[-1])
        bag = torch.repeat_interleave(torch.arange(batch_size, device=rows.device), bags.diff())
        asked = rows[begin:end]
        gradient = gradients[:, column : column + weight.shape[1]].float().index_select(0, bag)
        products = (gradient * weight.index_select(0, asked.clamp(min=0)).float()).sum(dim=1)
        of_positions[begin:end] = torch.where(asked < 0, products.new_zeros(()), products)
        column += weight.shape[1]
    return of_positions
