"""Target ``fbgemm``: FBGEMM's table-batched CPU kernels, without its module.

FBGEMM's module owns one flat buffer; recfx leaves every table where it is, the same ``Parameter`` with its own storage.
The kernels take one base tensor and an element offset per table, so the offsets here are the distances of the tables'
addresses from that base.
"""

from __future__ import annotations

import torch

from recfx.errors import Diagnostic
from recfx.ir.facts import LookupFacts
from recfx.lowering.fbgemm import limits as fbgemm_limits
from recfx.lowering.fbgemm.backward import FbgemmBackward
from recfx.lowering.fbgemm.layout import Layout
from recfx.lowering.fbgemm.rules import FLOAT32
from recfx.lowering.registry import LookupBatch, LookupKernel, LookupSpec
from recfx.lowering.step.trainable_lookup import LookedUp, TrainableLookup


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """None for float32 and float16 tables, without an optimizer or with one that FBGEMM has for the CPU."""
    return fbgemm_limits.serves(lookup)


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel, whose constant tensors are computed once."""
    layout = Layout(spec)
    trainable = TrainableLookup(spec, FbgemmBackward(layout))

    def lookup(weights: list[torch.Tensor], batch: LookupBatch) -> torch.Tensor:
        values, offsets = batch.values.to(torch.int64), batch.offsets.to(torch.int64)

        def forward(scale: torch.Tensor | None) -> LookedUp:
            return LookedUp(pool(layout, weights, values, offsets, scale), values)

        return trainable(weights, offsets, batch.per_sample_weights, forward)

    return lookup


def pool(
    layout: Layout, weights: list[torch.Tensor], values: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """FBGEMM's forward alone, which always runs on one thread.

    Args:
        layout: the lookup's constant arguments.
        weights: the tables' ``[rows, dim]`` tensors.
        values: ``[n]`` int64 rows, all of them in range.
        offsets: ``[F * B + 1]`` int64.
        scale: ``[n]`` float32 per-sample weights, or None.

    Returns:
        ``[B, sum D]`` float32.
    """
    part = layout.whole
    output: torch.Tensor = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
        layout.base,
        layout.weight_offsets(weights),
        part.dim_offsets,
        layout.total_dim,
        part.row_offsets,
        values,
        offsets,
        layout.pooling,
        scale,
        FLOAT32,
    )
    return output
