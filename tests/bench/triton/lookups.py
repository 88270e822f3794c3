"""The lookups of all tables in one launch, SUM.

Bytes: each id and the row that it names (as it is stored), the offsets, and the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from recfx.kernels.lookup.pooled_lookup import pooled_lookup_triton
from recfx.kernels.lookup.quantized_lookup import quantized_lookup_triton
from recfx.kernels.lookup.quantized_rows import BITS, dequantize_rows, quantize_rows
from tests.bench.harness import Contestant, Result
from tests.bench.setup import DISTRIBUTIONS, Setup
from tests.bench.triton.on_device import FBGEMM, OURS, TORCH, Workload, has_fbgemm, race, sized

_ALIGNMENT = 16  # of rows: what FBGEMM's operator takes on devices
_QUANTIZED = "fbgemm::int_nbit_split_embedding_codegen_lookup_function"

Call = Callable[[int], object]
Tables = list[torch.Tensor]


def _workloads(setup: Setup) -> Iterator[Workload]:
    setup = sized(setup)
    for distribution in DISTRIBUTIONS:
        yield Workload(setup, distribution)


def _bytes(workload: Workload, row: int) -> int:
    setup = workload.setup
    return workload.count * (8 + row) + workload.offsets.numel() * 8 + setup.batch * setup.tables * setup.dim * 4


def _one_by_one(workload: Workload, weights: Tables) -> Call:
    return lambda i: torch.cat(workload.embedding_bags(i, weights), dim=1).float()


def pooled_lookup(setup: Setup) -> Iterator[Result]:
    """Both distributions of ids; float32 and float16."""
    for workload in _workloads(setup):
        for dtype in (torch.float32, torch.float16):
            weights = [table.to(dtype) for table in workload.tables()]
            contestants = [
                Contestant(OURS, _pooled(workload, weights)),
                Contestant(TORCH, _one_by_one(workload, weights)),
            ]
            if dtype == torch.float32 and has_fbgemm(workload.device):
                contestants.append(Contestant(FBGEMM, _pooled_by_fbgemm(workload, weights)))
            size = workload.setup
            name = f"triton/pooled_lookup/{size.case(workload.distribution)}/{str(dtype).removeprefix('torch.')}"
            tolerance = 1e-4 if dtype == torch.float32 else 2e-3 * size.bag_length  # embedding_bag sums in the dtype
            moved = _bytes(workload, size.dim * weights[0].element_size())
            yield from race(name, workload, contestants, moved, tolerance, dtype=str(dtype))


def _pooled(workload: Workload, weights: Tables) -> Call:
    return lambda i: pooled_lookup_triton(workload.ids[i], workload.offsets, weights, workload.features, False, None)


def _pooled_by_fbgemm(workload: Workload, weights: Tables) -> Call:
    from tests.bench.fbgemm_module import table_batched

    @cache
    def module() -> Any:
        return table_batched(weights, "sgd")

    return torch.no_grad()(lambda i: module()(workload.ids[i], workload.offsets))


def quantized_lookup(setup: Setup) -> Iterator[Result]:
    """int8 and int4 rows, against the same rows as float32, and FBGEMM's operator for inference on the same bytes."""
    for workload in _workloads(setup):
        for bits in BITS:
            dim = workload.setup.dim
            tables = [quantize_rows(table, bits, _ALIGNMENT) for table in workload.tables()]
            wide = [dequantize_rows(table, dim, bits) for table in tables]
            contestants = [
                Contestant(OURS, _quantized(workload, tables, bits)),
                Contestant("F.embedding_bag of float32", _one_by_one(workload, wide)),
            ]
            if has_fbgemm(workload.device, _QUANTIZED):
                contestants.append(Contestant(FBGEMM, _quantized_by_fbgemm(workload, tables, bits)))
            name, row = f"triton/quantized_lookup/{workload.setup.case(workload.distribution)}", tables[0].shape[1]
            yield from race(f"{name}/int{bits}", workload, contestants, _bytes(workload, row), row_bytes=row)


def _quantized(workload: Workload, tables: Tables, bits: int) -> Call:
    how = ([workload.setup.dim] * len(tables), bits, workload.features, False, None)
    return lambda i: quantized_lookup_triton(workload.ids[i], workload.offsets, tables, *how)


def _quantized_by_fbgemm(workload: Workload, tables: Tables, bits: int) -> Call:
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

    device, dim, count = workload.device, workload.setup.dim, len(tables)
    place = EmbeddingLocation.DEVICE if device.type == "cuda" else EmbeddingLocation.HOST
    bytes_ = torch.cat([table.flatten() for table in tables])
    size = tables[0].numel()
    kind = {8: SparseType.INT8, 4: SparseType.INT4}[bits]
    most = {"max_int8_D": 0, "max_int4_D": 0, f"max_int{bits}_D": dim}
    constants = {
        "dev_weights": bytes_, "uvm_weights": bytes_[:0],
        "weights_placements": torch.full((count,), place.value, dtype=torch.int32, device=device),
        "weights_offsets": torch.arange(count, device=device) * size,
        "weights_tys": torch.full((count,), kind.as_int(), dtype=torch.uint8, device=device),
        "D_offsets": torch.arange(count + 1, dtype=torch.int32, device=device) * dim, "total_D": count * dim,
        "max_int2_D": 0, "max_float16_D": 0, "max_float32_D": 0, **most, "pooling_mode": 0, "indice_weights": None,
        "output_dtype": SparseType.FP32.as_int(), "row_alignment": _ALIGNMENT,
        "offsets": workload.offsets.int(),
    }  # fmt: skip
    ids = [values.int() for values in workload.ids]  # it takes 32 bits
    return lambda i: torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(indices=ids[i], **constants)
