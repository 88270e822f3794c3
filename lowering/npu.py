"""Target ``npu``: recfx's kernels in Triton, compiled by triton-ascend, for Ascend NPUs."""

from __future__ import annotations

from types import ModuleType

import torch

from recfx.errors import Diagnostic
from recfx.ir.facts import LookupFacts
from recfx.lowering import _triton_limits, _triton_lookup
from recfx.lowering.registry import LookupKernel, LookupSpec


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """None if there are kernels for the tables and optimizers, and they fit the chip."""
    return _triton_limits.serves("npu", lookup, chip)


def is_here(device: torch.device) -> Diagnostic | None:
    """None if triton-ascend is there, and the chip has a tiling table."""
    return _triton_limits.is_here("npu", device)


def operators(family: str, device_type: str) -> ModuleType | None:
    """The operators with kernels, for tensors on NPUs."""
    return _triton_limits.OPERATORS.get(family) if device_type == "npu" else None


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel for ``spec``."""
    return _triton_lookup.build(spec)
