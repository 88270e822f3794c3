"""Lowering: from graph nodes to kernels. There is one registry, and one file per target."""

from recfx.ir.context import LookupFacts
from recfx.lowering.registry import (
    BACKENDS,
    Backend,
    Choice,
    FindingKernel,
    IdsToRows,
    LookupBatch,
    LookupSpec,
    select_backend,
    select_planned,
)

__all__ = [
    "BACKENDS",
    "Backend",
    "Choice",
    "FindingKernel",
    "IdsToRows",
    "LookupBatch",
    "LookupFacts",
    "LookupSpec",
    "select_backend",
    "select_planned",
]
