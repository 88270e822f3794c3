"""``triton/quantized_lookup``: the pooled lookup of int8 and int4 rows, SUM, in one launch.

Peers: ``embedding_bag`` of the same rows as float32, and FBGEMM's operator for inference, which reads the same bytes.

Bytes: each id and the quantized row that it names, the offsets, and the output; for all contestants the same, although
``embedding_bag`` reads the wider rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from recfx.kernels.lookup.quantized_lookup import quantized_lookup_triton
from recfx.kernels.lookup.quantized_rows import BITS, dequantize_rows, quantize_rows
from tests.bench.harness import Contestant, Result
from tests.bench.setup import DISTRIBUTIONS, Setup
from tests.bench.triton.on_device import FBGEMM, OURS, Workload, has_fbgemm, race, sized

WIDE = "F.embedding_bag of float32"
_ALIGNMENT = 16  # of rows: what FBGEMM's operator takes on devices
_OPERATOR = "fbgemm::int_nbit_split_embedding_codegen_lookup_function"


def run(setup: Setup) -> Iterator[Result]:
    """Both distributions of ids, both widths."""
    setup = sized(setup)
    for distribution in DISTRIBUTIONS:
        workload = Workload(setup, distribution)
        for bits in BITS:
            tables = [quantize_rows(table, bits, _ALIGNMENT) for table in workload.tables()]
            contestants = [
                Contestant(OURS, _ours(workload, tables, bits)),
                Contestant(WIDE, _wide(workload, tables, bits)),
            ]
            if has_fbgemm(workload.device, _OPERATOR):
                contestants.append(Contestant(FBGEMM, _fbgemm(workload, tables, bits)))
            output = setup.batch * setup.tables * setup.dim * 4
            moved = workload.count * (8 + tables[0].shape[1]) + workload.offsets.numel() * 8 + output
            name = f"triton/quantized_lookup/{setup.case(distribution)}/int{bits}"
            yield from race(name, workload, contestants, moved, row_bytes=tables[0].shape[1])


def _ours(workload: Workload, tables: list[torch.Tensor], bits: int) -> Callable[[int], object]:
    dims = [workload.setup.dim] * len(tables)
    return lambda i: quantized_lookup_triton(
        workload.ids[i], workload.offsets, tables, dims, bits, workload.features, False, None
    )


def _wide(workload: Workload, tables: list[torch.Tensor], bits: int) -> Callable[[int], object]:
    weights = [dequantize_rows(table, workload.setup.dim, bits) for table in tables]
    return lambda i: torch.cat(workload.embedding_bags(i, weights), dim=1)


def _fbgemm(workload: Workload, tables: list[torch.Tensor], bits: int) -> Callable[[int], object]:
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
