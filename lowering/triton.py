"""Target ``triton``: recfx's kernels in Triton for CUDA, and for Triton's interpreter on the CPU."""

from __future__ import annotations

from types import ModuleType

import torch

from recfx.diagnostics import Diagnostic
from recfx.lowering import _triton_limits, _triton_lookup
from recfx.lowering.operators import FIND_ROWS
from recfx.lowering.registry import LookupKernel, LookupSpec


def decline(spec: LookupSpec) -> Diagnostic | None:
    """None if Triton has a compiler for the tables' device, and the kernels their dtype, dims and optimizers."""
    return _triton_limits.decline("triton", ("cuda", "cpu"), spec)


def operators(family: str, device: torch.device) -> ModuleType | Diagnostic | None:
    """The operators with kernels, for tensors on CUDA; on the CPU, where the C++ operators come first, only those that
    these lack.
    """
    device_types = ("cuda", "cpu") if family == FIND_ROWS.name else ("cuda",)
    return _triton_limits.operators("triton", device_types, family, device)


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel for ``spec``."""
    return _triton_lookup.build(spec)
