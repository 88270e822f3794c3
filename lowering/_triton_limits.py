"""What the kernels in Triton can serve: the limits of every target that uses them."""

from __future__ import annotations

from types import ModuleType

import torch

from recfx.diagnostics import Diagnostic
from recfx.kernels import bucketize_op, find_rows_op, launch, tiling
from recfx.lowering.registry import LookupSpec
from recfx.optim.fused_step_op import triton_module
from recfx.optim.rules.sgd import SGD

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_DIM = 1024  # the widest row that the kernels are checked with
_COUNT = 2**31 - 1  # bags and output columns are numbered in int32


def decline(by: str, device_types: tuple[str, ...], spec: LookupSpec) -> Diagnostic | None:
    """None if the kernels in Triton can serve the lookup where its tables are.

    Args:
        by: the name of the target that asks.
        device_types: those that it is for.
        spec: the lookup.
    """

    def refuse(reason: str, message: str) -> Diagnostic:
        return Diagnostic(reason, "", message, by=by)

    devices = {weight.device for weight in spec.weights}
    device = spec.weights[0].device
    if len(devices) != 1 or device.type not in device_types:
        found, wanted = "/".join(sorted({each.type for each in devices})), " and ".join(device_types)
        return refuse("device", f"the tables are on {found}; this target is for {wanted}.")
    why_not = launch.why_not(device)
    if why_not:
        return refuse("no_triton", why_not)
    dtypes = {weight.dtype for weight in spec.weights}
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        return refuse("dtype", f"a launch takes tables of float32, of float16 or of bfloat16, not of {names}.")
    if any(not weight.is_contiguous() for weight in spec.weights):
        return refuse("not_contiguous", "a table's rows are not contiguous.")
    widest = max(spec.tables, key=lambda table: table.embedding_dim)
    if widest.embedding_dim > _DIM:
        message = f"the kernels take rows of up to {_DIM} columns, table {widest.name!r} has {widest.embedding_dim}."
        return refuse("too_many_columns", message)
    if sum(table.embedding_dim * len(table.feature_names) for table in spec.tables) > _COUNT:
        return refuse("too_many_columns", f"the kernels number output columns up to {_COUNT}.")
    rules = {optimizer.rule for optimizer in spec.optimizers if optimizer is not None}
    for rule in rules:
        if not triton_module(rule):
            return refuse("optimizer", f"there is no step of {rule.name} in Triton.")
    try:
        chip = launch.chip_of(device)
    except ValueError as error:
        return refuse("no_tiling_table", f"{error}.")
    if chip is None or launch.simulated(device):
        return None
    block, size = tiling.block_of(widest.embedding_dim), spec.weights[0].element_size()
    kernels: list[tuple[str, tiling.RuleNeeds | None]] = [
        ("recfx_pooled_lookup", None),
        ("recfx_per_sample_weight_gradients", None),
    ]
    for rule in rules or {SGD}:  # whose step gives the gradient of the weights
        if rule.needs is None:
            return refuse("unified_buffer", f"the unified buffer that a step of {rule.name} takes was never measured.")
        kernels += [("recfx_fused_step", rule.needs), ("recfx_fused_step_of_borders", rule.needs)]
    for kernel, needs in kernels:
        too_large = tiling.refusal(chip, kernel, block, size, needs)
        if too_large:
            return refuse("unified_buffer", too_large)
    return None


_OPERATORS: dict[str, ModuleType] = {"bucketize": bucketize_op, "find_rows": find_rows_op}


def operators(
    by: str, device_types: tuple[str, ...], family: str, device: torch.device
) -> ModuleType | Diagnostic | None:
    """Routing ids, and finding their rows in indexes that are only read, have kernels in Triton.

    Args:
        by: the name of the target that asks.
        device_types: those that it is for.
        family: the name of a family of operators.
        device: where their tensors are.
    """
    if family not in _OPERATORS or device.type not in device_types:
        return None
    why_not = launch.why_not(device)
    if why_not:
        return Diagnostic("no_triton", "", why_not, by=by)
    if not launch.simulated(device):
        try:
            launch.chip_of(device)
        except ValueError as error:
            return Diagnostic("no_tiling_table", "", f"{error}.", by=by)
    return _OPERATORS[family]
