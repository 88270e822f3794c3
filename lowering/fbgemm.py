"""Target ``fbgemm``: the forward of FBGEMM's CPU kernels, table by table, with the backward of target ``reference``.

FBGEMM's module owns one flat buffer; its operator is called here with each table where it is, the same ``Parameter``.
"""

import fbgemm_gpu  # noqa: F401  (loads the operators)
import torch

from recfx.errors import Diagnostic
from recfx.ir.context import LookupFacts
from recfx.lowering.reference import AtenBackward
from recfx.lowering.registry import LookupBatch, LookupKernel, LookupSpec, Outputs
from recfx.lowering.step.trainable_lookup import LookedUp, TrainableLookup

_FLOAT32 = 0  # fbgemm_gpu.split_embedding_configs.SparseType.FP32.as_int()
_POOLING = {"SUM": 0, "MEAN": 1}


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """None for pooled lookups."""
    if lookup.combine in _POOLING:
        return None
    return Diagnostic("unsupported_combine", "", f"FBGEMM's operator has no combine={lookup.combine}.")


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel, which does not keep the weights."""
    trainable = TrainableLookup(AtenBackward(spec))
    features = [len(table.feature_names) for table in spec.tables]
    pooling = _POOLING[spec.combine]

    def lookup(weights: list[torch.Tensor], batch: LookupBatch) -> Outputs:
        values, offsets = batch.values.to(torch.int64), batch.offsets.to(torch.int64)

        def forward(scale: torch.Tensor | None) -> LookedUp:
            pooled, begin = [], 0
            for weight, count in zip(weights, features, strict=True):
                of_table = offsets[begin * batch.batch_size : (begin + count) * batch.batch_size + 1]
                pooled.append(_pool(weight.detach(), count, values, of_table, pooling, scale))
                begin += count
            return LookedUp((torch.cat(pooled, dim=1),), values)

        return trainable(weights, offsets, batch.per_sample_weights, forward)

    lookup.trainable = trainable  # type: ignore[attr-defined]  # of a function
    return lookup


def _pool(
    weight: torch.Tensor, features: int, values: torch.Tensor, offsets: torch.Tensor, pooling: int,
    scale: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The bags of one table's features, float32 ``[B, features * dim]``; this always runs on one thread."""
    rows, dim = weight.shape
    starts = torch.zeros(features, dtype=torch.int64, device="cpu")
    columns = torch.arange(features + 1, dtype=torch.int32, device="cpu") * dim
    row_starts = torch.tensor([0] * features + [rows], dtype=torch.int64, device="cpu")
    return torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
        weight.view(-1), starts, columns, features * dim, row_starts, values, offsets, pooling, scale, _FLOAT32
    )
