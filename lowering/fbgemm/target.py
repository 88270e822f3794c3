"""Target ``fbgemm``: FBGEMM's table-batched CPU kernels, without its module.

FBGEMM's module owns one flat buffer; recfx leaves every table where it is, the same ``Parameter`` with its own storage.
The kernels take one base tensor and an element offset per table, so the offsets here are the distances of the tables'
addresses from that base.
"""

from __future__ import annotations

import torch

from recfx.errors import Diagnostic
from recfx.ir.context import LookupFacts
from recfx.lowering.fbgemm.arguments import FBGEMM_RULES, FLOAT32, Layout
from recfx.lowering.fbgemm.backward import FbgemmBackward
from recfx.lowering.registry import LookupBatch, LookupKernel, LookupSpec, Outputs
from recfx.lowering.step.trainable_lookup import LookedUp, TrainableLookup
from recfx.optim.rules import rule_named

_ROWS = 2**31 - 1  # of one table: the backward's row numbers are int32. All tables together may have more
_COLUMNS = 2**31 - 1  # of all features together: also int32


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """None for float32 and float16 tables, without an optimizer or with one that FBGEMM has for the CPU."""

    def refuse(reason: str, message: str) -> Diagnostic:
        return Diagnostic(reason, "", message)

    dtypes, tables = lookup.dtypes, lookup.facts
    if not dtypes <= {torch.float32, torch.float16} or len(dtypes) != 1:
        names = ", ".join(sorted(map(str, dtypes)))
        return refuse("dtype", f"a call of FBGEMM's CPU kernels takes tables of float32 or of float16, not of {names}.")
    if not lookup.is_contiguous:
        return refuse("not_contiguous", "a table's rows are not contiguous, or a view negates them.")
    if any(table.rows == 0 for table in tables):
        return refuse("empty_table", "a table has no rows, which makes FBGEMM's backward crash.")
    longest = max(table.rows for table in tables)
    if longest >= _ROWS:
        return refuse("too_many_rows", f"FBGEMM's backward takes tables of fewer than {_ROWS} rows, not {longest}.")
    if sum(table.embedding_dim * len(table.feature_names) for table in lookup.tables) > _COLUMNS:
        return refuse("too_many_columns", f"FBGEMM numbers output columns up to {_COLUMNS}.")
    largest = max(table.rows * table.embedding_dim for table in tables)
    for optimizer in lookup.optimizers:
        rule, name = rule_named(optimizer.rule), optimizer.rule
        kernel = None if rule is None else FBGEMM_RULES.get(rule)
        if kernel is None:
            return refuse("optimizer", f"FBGEMM has no {name} on the CPU.")
        most = kernel.most_float32_elements
        if most is not None and torch.float32 in dtypes and largest > most:
            return refuse("table_too_large", kernel.if_larger)
        if dict(optimizer.group).get("weight_decay", 0):
            return refuse("weight_decay", f"FBGEMM's CPU {name} has no weight decay like torch.optim's.")
    return None


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel, whose constant tensors are computed once."""
    layout = Layout(spec)
    trainable = TrainableLookup(spec, FbgemmBackward(layout))

    def lookup(weights: list[torch.Tensor], batch: LookupBatch) -> Outputs:
        values, offsets = batch.values.to(torch.int64), batch.offsets.to(torch.int64)

        def forward(scale: torch.Tensor | None) -> LookedUp:
            return LookedUp((pool(layout, weights, values, offsets, scale),), values)

        return trainable(weights, offsets, batch.per_sample_weights, forward)

    return lookup


def pool(
    layout: Layout, weights: list[torch.Tensor], values: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor | None
) -> torch.Tensor:
    """FBGEMM's forward alone, which always runs on one thread: float32 ``[B, sum D]``.

    Args:
        layout: the lookup's constant arguments.
        weights: the tables' ``[rows, dim]`` tensors.
        values, offsets: int64 ``[n]`` rows, all of them in range, and int64 ``[F * B + 1]``.
        scale: ``[n]`` float32 per-sample weights, or None.
    """
    part = layout.whole
    return torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
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
