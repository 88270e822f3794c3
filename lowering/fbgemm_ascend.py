"""Target ``fbgemm_ascend``: the forward of the package of that name, where it is installed; gradients in ATen.

Of the package's operators, the lookup alone is used. Its fused backwards know an optimizer by a few numbers whose
meaning could not be checked against ``torch.optim``, and its permutation of bags sums lengths in float32, where
recfx's own stays exact: those remain recfx's.
"""

from __future__ import annotations

import torch

from recfx.errors import Diagnostic
from recfx.ir.facts import LookupFacts
from recfx.lowering import _fbgemm_ascend_operator as operator
from recfx.lowering.registry import LookupBatch, LookupKernel, LookupSpec
from recfx.lowering.step.aten_backward import AtenBackward
from recfx.lowering.step.trainable_lookup import LookedUp, TrainableLookup

_MULTIPLE = 8  # columns: rows are copied in units of 32 bytes
_DIM = 1024  # the widest row of recfx's own kernels; the package names no limit of this operator
_CHIPS = ("Ascend910B", "Ascend910_93", "Ascend95")


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """None for float32 tables without per-sample weights."""

    def refuse(reason: str, message: str) -> Diagnostic:
        return Diagnostic(reason, "", message, by="fbgemm_ascend")

    if chip is not None and not chip.startswith(_CHIPS):
        return refuse("chip", f"fbgemm_ascend has kernels for {', '.join(_CHIPS)}, not for {chip!r}.")
    if lookup.dtypes != {torch.float32}:
        names = ", ".join(sorted(str(dtype) for dtype in lookup.dtypes))
        return refuse("dtype", f"fbgemm_ascend takes float32 tables, not {names}.")
    if lookup.is_weighted:
        return refuse("per_sample_weights", "fbgemm_ascend has no lookup with per-sample weights.")
    if not lookup.is_contiguous:
        return refuse("not_contiguous", "a table's rows are not contiguous.")
    for table, facts in zip(lookup.tables, lookup.facts, strict=True):
        if facts.rows == 0:
            return refuse("empty_table", f"table {table.name!r} has no rows, which fbgemm_ascend refuses.")
        if table.embedding_dim % _MULTIPLE:
            message = f"fbgemm_ascend takes rows of a multiple of {_MULTIPLE} columns, "
            return refuse("unaligned_columns", f"{message}table {table.name!r} has {table.embedding_dim}.")
        if table.embedding_dim > _DIM:
            message = f"rows of more than {_DIM} columns were never looked up by this target, "
            return refuse("too_many_columns", f"{message}table {table.name!r} has {table.embedding_dim}.")
    return None


def is_here(device: torch.device) -> Diagnostic | None:
    """None if the package and its operator are."""
    missing = operator.why_not()
    return None if missing is None else Diagnostic(missing.reason, "", missing.message, by="fbgemm_ascend")


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel. The host waits for the device once per batch: for where each table's ids begin."""
    trainable = TrainableLookup(spec, AtenBackward(spec))
    layout = [(len(table.feature_names), table.embedding_dim) for table in spec.tables]
    pooling = spec.combine

    def lookup(weights: list[torch.Tensor], batch: LookupBatch) -> torch.Tensor:
        rows, offsets = batch.values.to(torch.int64).contiguous(), batch.offsets.to(torch.int64).contiguous()

        def forward(_: torch.Tensor | None) -> LookedUp:
            return LookedUp(_pool(weights, rows, offsets, layout, pooling, batch.batch_size), rows)

        return trainable(weights, offsets, None, forward)

    return lookup


def _pool(
    weights: list[torch.Tensor],
    rows: torch.Tensor,
    offsets: torch.Tensor,
    layout: list[tuple[int, int]],
    pooling: str,
    batch_size: int,
) -> torch.Tensor:
    borders = offsets[::batch_size].tolist() if batch_size else [0] * (sum(features for features, _ in layout) + 1)
    pooled, feature = [], 0
    for weight, (features, dim) in zip(weights, layout, strict=True):
        begin, end = borders[feature], borders[feature + features]
        if begin == end:  # the operator takes no empty batch
            pooled.append(torch.zeros(batch_size, features * dim, dtype=torch.float32, device=weight.device))
        else:
            of_table = offsets[feature * batch_size : (feature + features) * batch_size + 1] - begin
            pooled.append(operator.pool_table(weight, rows[begin:end], of_table, features, pooling))
        feature += features
    return torch.cat(pooled, dim=1)
