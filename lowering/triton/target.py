"""Targets ``triton`` and ``npu``: recfx's kernels in Triton, for CUDA, Triton's interpreter, and Ascend NPUs."""

from __future__ import annotations

import torch

from recfx.errors import Diagnostic
from recfx.ir.context import LookupFacts
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.kernels.build import launch, tiling
from recfx.lowering.triton.lookup import build
from recfx.optim.fused_step_op import triton_module
from recfx.optim.rules import rule_named
from recfx.optim.rules.sgd import SGD

__all__ = ["build", "is_here", "serves", "too_many_columns"]

_DIM = 1024  # the widest row that the kernels are checked with
_COUNT = 2**31 - 1  # bags and output columns are numbered in int32


def serves(lookup: LookupFacts, chip: str | None) -> Diagnostic | None:
    """None if there are kernels in Triton for the lookup, and they fit the NPU of this name, if there is one."""

    def refuse(reason: str, message: str) -> Diagnostic:
        return Diagnostic(reason, "", message)

    too_wide = too_many_columns(lookup)
    if too_wide is not None:
        return too_wide
    rules = []
    for name in dict.fromkeys(optimizer.rule for optimizer in lookup.optimizers):
        rule = rule_named(name)
        if rule is None or not triton_module(rule):
            return refuse("optimizer", f"there is no step of {name} in Triton.")
        rules.append(rule)
    if chip is None:
        return None
    try:
        limits = tiling.chip_named(chip)
    except ValueError as error:
        return refuse("no_tiling_table", f"{error}.")
    widest = max(table.embedding_dim for table in lookup.tables)
    block, size = tiling.block_of(widest), lookup.facts[0].dtype.itemsize
    kernels: list[tuple[str, tiling.RuleNeeds | None]] = [("recfx_gather_rows", None)]
    if lookup.combine != NOT_COMBINED:
        kernels = [("recfx_pooled_lookup", None), ("recfx_per_sample_weight_gradients", None)]
    for rule in rules or [SGD]:  # whose step gives the gradient of the weights
        if rule.needs is None:
            return refuse("unified_buffer", f"the unified buffer that a step of {rule.name} takes was never measured.")
        kernels += [("recfx_fused_step", rule.needs), ("recfx_fused_step_of_borders", rule.needs)]
    for kernel, needs in kernels:
        too_large = tiling.refusal(limits, kernel, block, size, needs)
        if too_large:
            return refuse("unified_buffer", too_large)
    return None


def too_many_columns(lookup: LookupFacts) -> Diagnostic | None:
    """None if the kernels can number the columns of the lookup."""
    widest = max(lookup.tables, key=lambda table: table.embedding_dim)
    message = ""
    if widest.embedding_dim > _DIM:
        message = f"the kernels take rows of up to {_DIM} columns, table {widest.name!r} has {widest.embedding_dim}."
    elif sum(table.embedding_dim * len(table.feature_names) for table in lookup.tables) > _COUNT:
        message = f"the kernels number output columns up to {_COUNT}."
    return Diagnostic("too_many_columns", "", message) if message else None


def is_here(device: torch.device) -> Diagnostic | None:
    """None if Triton has a compiler for the device, or interprets kernels, and there is a tiling table for its chip."""
    refusal = launch.refusal(device)
    return Diagnostic(refusal[0], "", refusal[1]) if refusal else None
