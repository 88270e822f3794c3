"""The lookups of all tables in one launch, SUM, and the gradient of the weights of ids, which FBGEMM has only together
with a step: rows of every width, and tables of several widths at once.

Bytes: each id and the row that it names (as it is stored), the offsets, and the output, or its gradient and theirs.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate
from typing import Any

import torch

from recfx.kernels.lookup.per_sample_weights import per_sample_weight_gradients_triton
from recfx.kernels.lookup.pooled_lookup import pooled_lookup_triton
from recfx.kernels.lookup.quantized_lookup import quantized_lookup_triton
from recfx.kernels.lookup.quantized_rows import BITS, dequantize_rows, quantize_rows
from tests.bench.harness import Contestant, Result
from tests.bench.setup import DISTRIBUTIONS, Setup
from tests.bench.triton.on_device import FBGEMM, OURS, TORCH, Workload, has_fbgemm, race, sized

_ALIGNMENT = 16  # of rows: what FBGEMM's operator takes on devices
_QUANTIZED = "fbgemm::int_nbit_split_embedding_codegen_lookup_function"
_ROUNDED = {FBGEMM: 2e-3}  # its operators for tables of halves and of codes round what they give back

Call = Callable[[int], object]
Tables = list[torch.Tensor]


def _workloads(setup: Setup) -> Iterator[Workload]:
    setup = sized(setup)
    for distribution in DISTRIBUTIONS:
        yield from Workload(setup, distribution).of_widths()


def _name(kernel: str, workload: Workload) -> str:
    return f"triton/{kernel}/{workload.setup.case(workload.distribution)}/{workload.columns}"


def _bytes(workload: Workload, tables: Tables, of_each_id: int = 8) -> int:
    """With one row of each table for each of its ids; ``of_each_id``: what else is read and written of one."""
    ids = workload.count // len(tables)
    rows = sum(ids * (table.shape[1] * table.element_size() + of_each_id) for table in tables)
    return rows + workload.offsets.numel() * 8 + workload.setup.batch * sum(workload.dims) * 4


def _one_by_one(workload: Workload, weights: Tables) -> Call:
    return lambda i: torch.cat(workload.embedding_bags(i, weights), dim=1).float()


def pooled_lookup(setup: Setup) -> Iterator[Result]:
    """Both distributions of ids; float32 and float16."""
    for workload in _workloads(setup):
        for dtype in (torch.float32, torch.float16):
            yield from _pooled_lookup(workload, dtype)


def _pooled_lookup(workload: Workload, dtype: torch.dtype) -> Iterator[Result]:
    weights = [table.to(dtype) for table in workload.tables()]
    contestants = [Contestant(OURS, _pooled(workload, weights)), Contestant(TORCH, _one_by_one(workload, weights))]
    if has_fbgemm(workload.device):
        contestants.append(Contestant(FBGEMM, _pooled_by_fbgemm(workload, weights)))
    name = f"{_name('pooled_lookup', workload)}/{str(dtype).removeprefix('torch.')}"
    # embedding_bag sums in the dtype
    tolerance = {} if dtype == torch.float32 else {TORCH: 2e-3 * workload.setup.bag_length, **_ROUNDED}
    yield from race(name, workload, contestants, _bytes(workload, weights), tolerance, dtype=str(dtype))


def _pooled(workload: Workload, weights: Tables) -> Call:
    return lambda i: pooled_lookup_triton(workload.ids[i], workload.offsets, weights, workload.features, False, None)


def _pooled_by_fbgemm(workload: Workload, weights: Tables) -> Call:
    from tests.bench.fbgemm_module import table_batched

    @cache
    def module() -> Any:
        return table_batched(weights, "sgd")

    return torch.no_grad()(lambda i: module()(workload.ids[i], workload.offsets).float())


def per_sample_weights(setup: Setup) -> Iterator[Result]:
    """Both distributions of ids, float32; the peer is ``embedding_bag``'s backward."""
    for workload in _workloads(setup):
        yield from _per_sample_weights(workload)


def _per_sample_weights(workload: Workload) -> Iterator[Result]:
    weights, gradients = workload.tables(), workload.gradients()
    scales = [scale.requires_grad_() for scale in workload.by_table(torch.rand(workload.count, device=workload.device))]
    pooled: Tables = []

    def ours(i: int) -> torch.Tensor:
        arguments = (workload.ids[i], workload.offsets, gradients, weights, workload.features)
        return per_sample_weight_gradients_triton(*arguments)

    def forward(i: int) -> None:
        pooled[:] = workload.embedding_bags(i, weights, scales)

    def backward(i: int) -> torch.Tensor:
        return torch.cat(torch.autograd.grad(pooled, scales, gradients.split(workload.dims, dim=1)))

    contestants = [Contestant(OURS, ours), Contestant("embedding_bag's backward", backward, before=forward)]
    yield from race(_name("per_sample_weights", workload), workload, contestants, _bytes(workload, weights, 12))


def quantized_lookup(setup: Setup) -> Iterator[Result]:
    """int8 and int4 rows, against the same rows as float32, and FBGEMM's operator for inference on the same bytes."""
    for workload in _workloads(setup):
        for bits in BITS:
            yield from _quantized_lookup(workload, bits)


def _quantized_lookup(workload: Workload, bits: int) -> Iterator[Result]:
    tables = [quantize_rows(table, bits, _ALIGNMENT) for table in workload.tables()]
    wide = [dequantize_rows(table, dim, bits) for table, dim in zip(tables, workload.dims, strict=True)]
    contestants = [
        Contestant(OURS, _quantized(workload, tables, bits)),
        Contestant("F.embedding_bag of float32", _one_by_one(workload, wide)),
    ]
    if has_fbgemm(workload.device, _QUANTIZED):
        contestants.append(Contestant(FBGEMM, _quantized_by_fbgemm(workload, tables, bits)))
    name = f"{_name('quantized_lookup', workload)}/int{bits}"
    yield from race(name, workload, contestants, _bytes(workload, tables), _ROUNDED, row_bytes=tables[0].shape[1])


def _quantized(workload: Workload, tables: Tables, bits: int) -> Call:
    how = (workload.dims, bits, workload.features, False, None)
    return lambda i: quantized_lookup_triton(workload.ids[i], workload.offsets, tables, *how)


def _quantized_by_fbgemm(workload: Workload, tables: Tables, bits: int) -> Call:
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation

    device, dims, count = workload.device, workload.dims, len(tables)
    place = EmbeddingLocation.DEVICE if device.type == "cuda" else EmbeddingLocation.HOST
    bytes_ = torch.cat([table.flatten() for table in tables])
    kind = {8: SparseType.INT8, 4: SparseType.INT4}[bits]
    most = {"max_int8_D": 0, "max_int4_D": 0, f"max_int{bits}_D": max(dims)}
    constants = {
        "dev_weights": bytes_, "uvm_weights": bytes_[:0],
        "weights_placements": torch.full((count,), place.value, dtype=torch.int32, device=device),
        "weights_offsets": torch.tensor([0, *accumulate(table.numel() for table in tables[:-1])], device=device),
        "weights_tys": torch.full((count,), kind.as_int(), dtype=torch.uint8, device=device),
        "D_offsets": torch.tensor([0, *accumulate(dims)], dtype=torch.int32, device=device), "total_D": sum(dims),
        "max_int2_D": 0, "max_float16_D": 0, "max_float32_D": 0, **most, "pooling_mode": 0, "indice_weights": None,
        "output_dtype": SparseType.FP32.as_int(), "row_alignment": _ALIGNMENT,
        "offsets": workload.offsets.int(),
    }  # fmt: skip
    ids = [values.int() for values in workload.ids]  # it takes 32 bits
    return lambda i: torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(indices=ids[i], **constants)
