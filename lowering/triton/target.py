"""Target ``triton``: recfx's kernels in Triton for CUDA, and for Triton's interpreter on the CPU."""

from __future__ import annotations

import torch

from recfx.errors import Diagnostic
from recfx.ir.facts import LookupFacts
from recfx.lowering.registry import LookupKernel, LookupSpec
from recfx.lowering.triton import limits as triton_limits
from recfx.lowering.triton import lookup as triton_lookup


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """None if there are kernels for the tables' dtype, dims and optimizers."""
    return triton_limits.serves("triton", lookup, chip)


def is_here(device: torch.device) -> Diagnostic | None:
    """None if Triton has a compiler for the device, or interprets kernels on the CPU."""
    return triton_limits.is_here("triton", device)


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel for ``spec``."""
    return triton_lookup.build(spec)
