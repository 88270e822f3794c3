"""Target ``npu``: recfx's kernels in Triton, compiled by triton-ascend, for Ascend NPUs."""

from __future__ import annotations

import torch

from recfx.errors import Diagnostic
from recfx.ir.facts import LookupFacts
from recfx.lowering.registry import LookupKernel, LookupSpec
from recfx.lowering.triton import limits as triton_limits
from recfx.lowering.triton import lookup as triton_lookup


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """None if there are kernels for the tables and optimizers, and they fit the chip."""
    return triton_limits.serves("npu", lookup, chip)


def is_here(device: torch.device) -> Diagnostic | None:
    """None if triton-ascend is there, and the chip has a tiling table."""
    return triton_limits.is_here("npu", device)


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel for ``spec``."""
    return triton_lookup.build(spec)
