"""Pooled lookups of quantized rows; ``quantized_rows.py`` says what the bytes of a row are.

``recfx::quantized_lookup_triton`` runs by the kernel in ``quantized_lookup_triton.py``; on the CPU, on which files with
the operator are read as well, in ATen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recfx.kernels.build import launch, tiling
from recfx.kernels.build.plain_arguments import triton_operator
from recfx.kernels.lookup.pooled_lookup_reference import pool_bags
from recfx.kernels.lookup.quantized_rows import codes_and_range
from recfx.kernels.lookup.table_layout import layout_of_shapes, starts


@triton_operator("recfx::quantized_lookup_triton")
def quantized_lookup_triton(
    rows: Tensor,
    offsets: Tensor,
    tables: list[Tensor],
    dims: list[int],
    bits: int,
    table_of_feature: list[int],
    mean: bool,
    per_sample_weights: Tensor | None,
) -> Tensor:
    """Pool the dequantized rows of every bag, in one launch; on the CPU without Triton's interpreter, in ATen.

    Args:
        rows: int64 ``[n]``; -1 adds nothing.
        offsets: int64 ``[F * B + 1]``.
        tables: contiguous uint8 ``[rows, row_bytes]``, as ``quantized_rows.py`` lays rows out, on one device, at any
            address.
        dims: the columns of each table, at most 1,024.
        bits: per code, 8 or 4, of all tables.
        table_of_feature: the position of each feature's table.
        mean: divide each sum by the bag's length, which counts rows of -1.
        per_sample_weights: float32 ``[n]``, or None.

    Returns:
        float32 ``[B, sum of the features' dims]``, computed in float32 in the order of the rows.
    """
    if rows.device.type == "cpu" and not launch.is_interpreted():
        return quantized_lookup_reference(rows, offsets, tables, dims, bits, table_of_feature, mean, per_sample_weights)
    from recfx.kernels.lookup.lookup_gpu_triton import recfx_quantized_lookup_on_gpu
    from recfx.kernels.lookup.quantized_lookup_triton import recfx_quantized_lookup

    shapes = tuple((table.shape[0], dim) for table, dim in zip(tables, dims, strict=True))
    layout = layout_of_shapes(rows.device, shapes, tuple(table_of_feature))
    bags = offsets.numel() - 1
    batch_size = bags // len(table_of_feature)
    pooled = torch.empty(batch_size, layout.columns, dtype=torch.float32, device=rows.device)
    if bags == 0:
        return pooled
    block = tiling.block_of(layout.largest_dim)
    scales = pooled if per_sample_weights is None else per_sample_weights  # not read
    form = {"BLOCK_D": block, "BITS": bits, "WEIGHTED": per_sample_weights is not None, "MEAN": mean}
    sizes = bags, batch_size, layout.columns
    row_bytes = [tables[table].shape[1] for table in table_of_feature]
    if launch.takes_gpu_forms(rows.device) and _are_words(tables):
        form["BAGS"] = at_once = tiling.bags_on_gpu(block, 1)
        words = [table.view(torch.int32) for table in tables]
        row_words = launch.numbers_on(rows.device, tuple(count // 4 for count in row_bytes), torch.int32)
        launch.launch(
            recfx_quantized_lookup_on_gpu, -(-bags // at_once), rows, offsets, scales,
            words[0], starts(words, table_of_feature), row_words, layout.first_columns, pooled, *sizes, **form,
        )  # fmt: skip
        return pooled
    launch.launch(
        recfx_quantized_lookup, launch.programs(rows.device, bags, "recfx_quantized_lookup"), rows, offsets, scales,
        tables[0].view(torch.int8), starts(tables, table_of_feature),
        launch.numbers_on(rows.device, tuple(row_bytes), torch.int32), layout.first_columns, *[pooled] * 3, *sizes,
        ROWS=launch.lookup_rows(rows.device, block, "recfx_quantized_lookup"), **form,
    )  # fmt: skip
    return pooled


def _are_words(tables: list[Tensor]) -> bool:
    """Whether all rows begin at a multiple of 4 bytes, and are as many whole words."""
    return all(table.shape[1] % 4 == 0 and table.data_ptr() % 4 == 0 for table in tables)


@quantized_lookup_triton.register_fake
def _fake(
    rows: Tensor, offsets: Tensor, tables: list[Tensor], dims: list[int], bits: int, table_of_feature: list[int],
    *rest: object,
) -> Tensor:  # fmt: skip
    columns = sum(dims[table] for table in table_of_feature)
    return rows.new_empty((offsets.numel() - 1) // len(table_of_feature), columns, dtype=torch.float32)


def quantized_lookup_reference(
    rows: Tensor,
    offsets: Tensor,
    tables: list[Tensor],
    dims: list[int],
    bits: int,
    table_of_feature: list[int],
    mean: bool,
    per_sample_weights: Tensor | None,
) -> Tensor:
    """The operator in ATen: a row counts as ``code * (scale * w) + bias * w``, with its per-sample weight ``w``."""
    batch_size = (offsets.numel() - 1) // len(table_of_feature)
    pooled: list[Tensor] = []
    for feature in range(len(table_of_feature)):
        table, dim = tables[table_of_feature[feature]], dims[table_of_feature[feature]]
        bags = offsets[feature * batch_size : (feature + 1) * batch_size + 1]
        begin, end = int(bags[0]), int(bags[-1])
        present = rows[begin:end] >= 0
        codes, scale, bias = codes_and_range(table[rows[begin:end][present]], dim, bits)
        if per_sample_weights is not None:
            weights = per_sample_weights[begin:end][present].unsqueeze(1)
            scale, bias = scale * weights, bias * weights
        pooled.append(pool_bags(codes * scale + bias, present, bags, mean))
    return torch.cat(pooled, dim=1)
