"""Stands in for the package fbgemm_ascend: its lookup, as its documentation describes it, one row after the other.

It checks what the package's sources say that the operator needs, and computes on the CPU: nothing here is an NPU's.
"""

from __future__ import annotations

import itertools

import torch

SCHEMA = (
    "split_embedding_codegen_forward_unweighted_cuda(Tensor dev_weights, Tensor uvm_weights, Tensor lxu_cache_weights, "
    "Tensor weights_placements, Tensor weights_offsets, Tensor D_offsets, SymInt total_D, SymInt max_D, "
    "Tensor indices, Tensor offsets, int pooling_mode, Tensor lxu_cache_locations, Tensor uvm_cache_stats, "
    "int output_dtype, bool is_experimental, Tensor hash_indices=None, Tensor offset_per_key=None, "
    "Tensor rows_per_table=None) -> Tensor"
)
MEAN = 1
calls: list[int] = []
"""How many rows each call looked up."""


def lookup(
    dev_weights: torch.Tensor,
    uvm_weights: torch.Tensor,
    lxu_cache_weights: torch.Tensor,
    weights_placements: torch.Tensor,
    weights_offsets: torch.Tensor,
    D_offsets: torch.Tensor,
    total_D: int,
    max_D: int,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    pooling_mode: int,
    lxu_cache_locations: torch.Tensor,
    uvm_cache_stats: torch.Tensor,
    output_dtype: int,
    is_experimental: bool,
    hash_indices: torch.Tensor | None = None,
    offset_per_key: torch.Tensor | None = None,
    rows_per_table: torch.Tensor | None = None,
) -> torch.Tensor:
    given = (dev_weights, weights_offsets, D_offsets, indices, offsets, offset_per_key)
    for tensor in given:
        assert tensor is not None
        assert tensor.numel() > 0
        assert (tensor.dim(), tensor.device.type, tensor.is_contiguous()) == (1, "npu", True)
    kinds = [torch.float32, torch.int64, torch.int32, torch.int64, torch.int64, torch.int64]
    assert [tensor.dtype for tensor in given if tensor is not None] == kinds
    assert (uvm_weights.numel(), lxu_cache_weights.numel()) == (0, 0)
    assert [weights_placements.dtype, lxu_cache_locations.dtype, uvm_cache_stats.dtype] == [torch.int32] * 3
    assert (output_dtype, is_experimental, hash_indices, rows_per_table) == (0, False, None, None)
    features = weights_offsets.numel()
    borders, starts, columns = offsets.tolist(), weights_offsets.tolist(), D_offsets.tolist()
    dims = [end - begin for begin, end in itertools.pairwise(columns)]
    assert (borders[0], borders[-1]) == (0, indices.numel())
    assert (columns[0], columns[-1], max(dims)) == (0, total_D, max_D)
    assert not any(dim % 8 for dim in dims)
    batch_size, rest = divmod(offsets.numel() - 1, features)
    assert rest == 0
    assert offset_per_key is not None
    assert offset_per_key.tolist() == borders[::batch_size]
    weights, rows = dev_weights.cpu(), indices.tolist()
    pooled = torch.zeros(batch_size, total_D)
    for feature, dim in enumerate(dims):
        for sample in range(batch_size):
            begin, end = borders[feature * batch_size + sample : feature * batch_size + sample + 2]
            for row in rows[begin:end]:
                first = starts[feature] + row * dim
                found = weights[first : first + dim]
                assert found.numel() == dim
                share = end - begin if pooling_mode == MEAN else 1
                pooled[sample, columns[feature] : columns[feature + 1]] += found / share
    calls.append(len(rows))
    return pooled.to(dev_weights.device)


library = torch.library.Library("fbgemm", "FRAGMENT")
library.define(SCHEMA)
library.impl("split_embedding_codegen_forward_unweighted_cuda", lookup, "Autograd")
