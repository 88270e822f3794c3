"""A toy kernel target: a Python loop over bags, for SUM lookups of small tables; autograd gives the backward."""

import itertools

import torch

from recfx.errors import Diagnostic
from recfx.ir.context import LookupFacts
from recfx.lowering.registry import LookupBatch, LookupKernel, LookupSpec, Outputs

MOST_ROWS = 1000


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """None for SUM lookups without per-sample weights and without fused optimizers, in tables of a few rows."""
    if lookup.combine != "SUM" or lookup.is_weighted:
        return Diagnostic("pooling", "", "the loop only adds.")
    if lookup.optimizers:
        return Diagnostic("optimizer", "", "the loop has no fused optimizers.")
    if any(table.rows > MOST_ROWS for table in lookup.facts):
        return Diagnostic("too_many_rows", "", f"the loop takes tables of up to {MOST_ROWS} rows.")
    return None


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel."""
    tables = [position for position, table in enumerate(spec.tables) for _ in table.feature_names]

    def lookup(weights: list[torch.Tensor], batch: LookupBatch) -> Outputs:
        offsets = batch.offsets.tolist()
        columns = []
        for feature, table in enumerate(tables):
            bags = offsets[feature * batch.batch_size : (feature + 1) * batch.batch_size + 1]
            pooled = [
                weights[table][batch.values[begin:end].long()].sum(dim=0) for begin, end in itertools.pairwise(bags)
            ]
            columns.append(torch.stack(pooled).float())
        return (torch.cat(columns, dim=1),)

    return lookup
