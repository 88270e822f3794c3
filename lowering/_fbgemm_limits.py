"""What FBGEMM's CPU kernels can train: the limits of target ``fbgemm``."""

from __future__ import annotations

import torch

from recfx.diagnostics import Diagnostic
from recfx.lowering._fbgemm_rules import FBGEMM_RULES
from recfx.lowering.registry import LookupSpec

_ROWS = 2**31 - 1  # of one table: the backward's row numbers are int32. All tables together may have more
_COLUMNS = 2**31 - 1  # of all features together: also int32


def decline(spec: LookupSpec) -> Diagnostic | None:
    """None for float32 and float16 tables on the CPU, without an optimizer or with one that FBGEMM has for the CPU."""

    def refuse(reason: str, message: str) -> Diagnostic:
        return Diagnostic(reason, "", message, by="fbgemm")

    dtypes = {weight.dtype for weight in spec.weights}
    devices = {weight.device.type for weight in spec.weights}
    if devices != {"cpu"}:
        return refuse("device", f"the tables are on {'/'.join(sorted(devices))}; this target is for the CPU.")
    if not dtypes <= {torch.float32, torch.float16} or len(dtypes) != 1:
        return refuse("dtype", f"FBGEMM's CPU kernels take float32 or float16 tables, not {dtypes}.")
    if any(not weight.is_contiguous() for weight in spec.weights):
        return refuse("not_contiguous", "a table's rows are not contiguous.")
    if any(weight.shape[0] == 0 for weight in spec.weights):
        return refuse("empty_table", "a table has no rows, which makes FBGEMM's backward crash.")
    longest = max(weight.shape[0] for weight in spec.weights)
    if longest >= _ROWS:
        return refuse("too_many_rows", f"FBGEMM's backward takes tables of fewer than {_ROWS} rows, not {longest}.")
    if sum(table.embedding_dim * len(table.feature_names) for table in spec.tables) > _COLUMNS:
        return refuse("too_many_columns", f"FBGEMM numbers output columns up to {_COLUMNS}.")
    largest = max(weight.numel() for weight in spec.weights)
    for optimizer in spec.optimizers:
        if optimizer is None:
            continue
        kernel, name = FBGEMM_RULES.get(optimizer.rule), optimizer.rule.name
        if kernel is None:
            return refuse("optimizer", f"FBGEMM has no {name} on the CPU.")
        most = kernel.most_float32_elements
        if most is not None and torch.float32 in dtypes and largest > most:
            return refuse("table_too_large", kernel.if_larger)
        if optimizer.group.get("weight_decay", 0):
            return refuse("weight_decay", f"FBGEMM's CPU {name} has no weight decay like torch.optim's.")
    return None
