"""The errors for which a plan can be refused, and what to do about each."""

from __future__ import annotations

from recfx.errors import ConversionError

_ADVICE = {
    "invalid_argument": "pass a dict from table name to torchrec.distributed.types.ParameterSharding.",
    "plan_unknown_table": "make the plan from this model, or remove the table from it.",
    "plan_missing_table": "make the plan from this model.",
    "unsupported_sharding_type": "use one of the seven types of torchrec.distributed.types.ShardingType.",
    "unsupported_compute_kernel": "constrain the planner to compute_kernels=['fused', 'dense'].",
    "unsupported_plan_option": "leave it out of the constraints.",
    "plan_shape_mismatch": "make the plan from the converted model: hashing may have given the table more rows.",
    "plan_rank": "make the plan for this number of ranks.",
    "plan_invalid": "make the plan with torchrec's planner, or construct_module_sharding_plan.",
}


def plan_error(reason: str, message: str, path: str) -> ConversionError:
    """The error of a plan; ``path`` is the fully qualified name of the collection."""
    return ConversionError(message, reason=reason, module_path=path, what_to_do=_ADVICE[reason])


def table_error(reason: str, table: str, what: str, path: str) -> ConversionError:
    """The error of the plan of one table; ``what`` says what the plan does, as the rest of the sentence."""
    return plan_error(reason, f"the plan of table {table!r} {what}", path)
