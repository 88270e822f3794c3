"""Target ``npu``: recfx's kernels in Triton, compiled by triton-ascend, for Ascend NPUs."""

from __future__ import annotations

from types import ModuleType

import torch

from recfx.diagnostics import Diagnostic
from recfx.lowering import _triton_limits, _triton_lookup
from recfx.lowering.registry import LookupKernel, LookupSpec


def decline(spec: LookupSpec) -> Diagnostic | None:
    """None if triton-ascend is there, the chip has a tiling table, and the kernels serve the tables and optimizers."""
    return _triton_limits.decline("npu", ("npu",), spec)


def operators(family: str, device: torch.device) -> ModuleType | Diagnostic | None:
    """The operators with kernels, for tensors on NPUs."""
    return _triton_limits.operators("npu", ("npu",), family, device)


def build(spec: LookupSpec) -> LookupKernel:
    """The kernel for ``spec``."""
    return _triton_lookup.build(spec)
