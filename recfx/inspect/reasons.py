"""What is worth saying about a table: one small rule per reason, in one literal list.

The rules about indexes are in ``capacity_reasons.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from torchrec.modules.embedding_configs import data_type_to_dtype

from recfx.errors import Diagnostic, Severity
from recfx.hashing import HashConfig
from recfx.inspect.capacity_reasons import index_reasons
from recfx.inspect.facts import ConvertedTable
from recfx.kernels.build import library
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.fused_params import weight_decay_left_out

_DEFAULT, _SETTINGS = HashConfig(), [field.name for field in fields(HashConfig)]


def table_reasons(table: ConvertedTable) -> tuple[Diagnostic, ...]:
    """Every rule's answer for one table."""
    return tuple(reason for rule in _RULES if (reason := rule(table)) is not None) + index_reasons(table)


def backend_unusable(table: ConvertedTable) -> Diagnostic | None:
    """The backend that the user named cannot serve the table where it is now."""
    refused = table.kernel.refused
    return None if refused is None else replace(refused, path=table.module_path)


def kernel_fallback(table: ConvertedTable) -> Diagnostic | None:
    """The slow reference target is used because the other targets declined."""
    if table.kernel.name != "reference" or not table.kernel.passed_over or table.weight.is_meta:
        return None
    why = " ".join(f"{declined.by}: {declined.message}" for declined in table.kernel.passed_over)
    advice = "expect a slower lookup, or change what the message names."
    return Diagnostic(
        "kernel_fallback", table.module_path, f"the reference kernel serves it. {why}", advice, Severity.WARNING
    )


def no_library(table: ConvertedTable) -> Diagnostic | None:
    """Neither did a library come with recfx that serves here, nor could one be compiled."""
    why = library.why_not()
    if not why or table.weight.is_meta or (table.index is None and table.weight.device.type != "cpu"):
        return None
    message = (
        f"recfx's C++ library is missing: {why}. "
        + ("Its ids are" if table.index is not None else "It is")
        + " looked up without it, and a training step on raw ids takes about ten times as long."
    )
    return Diagnostic("no_library", table.module_path, message, library.WHAT_TO_DO, Severity.WARNING)


def optimizer_not_fused(table: ConvertedTable) -> Diagnostic | None:
    """An optimizer in backward that runs on the whole table."""
    why = table.optimizer
    if not isinstance(why, Diagnostic):
        return None
    return Diagnostic("optimizer_not_fused", table.module_path, why.message, why.what_to_do, Severity.WARNING)


def only_touched_rows(table: ConvertedTable) -> Diagnostic | None:
    """The dense torch rule would also update rows that the batch does not read."""
    optimizer = table.optimizer
    if not isinstance(optimizer, FusedOptimizer):
        return None
    unlike_dense = optimizer.rule.unlike_dense(optimizer.group)
    if not unlike_dense:
        return None
    message = f"fused {unlike_dense} updates only rows that a batch reads; the dense torch optimizer updates every row."
    return Diagnostic("only_touched_rows", table.module_path, message, "nothing, unless you rely on the dense rule.")


def weight_decay_not_applied(table: ConvertedTable) -> Diagnostic | None:
    """One of TorchRec's placeholders asks for a weight decay that FBGEMM would leave out."""
    optimizer = table.optimizer
    if not isinstance(optimizer, FusedOptimizer) or not optimizer.left_out:
        return None
    return weight_decay_left_out(optimizer, table.module_path)


def weights_not_used(table: ConvertedTable) -> Diagnostic | None:
    """A table that existed before is given out anew by its index, starting with row 0."""
    if not table.existed or table.weight.is_meta or table.index is None or table.spec.custom_init_fn:
        return None
    if table.index.config.dense_rows != 0:
        return None
    return Diagnostic(
        "weights_not_used",
        table.module_path,
        "with raw_ids() (dense_rows=0), the table starts anew: each new id overwrites a row with initial weights.",
        "nothing, if the table was not trained before; if ids were row numbers, leave out raw_ids().",
    )


def index_settings_not_used(table: ConvertedTable) -> Diagnostic | None:
    """Settings for new ids on a table that takes no new ids, and for ids that lose rows where none does."""
    config = table.spec.hashing
    if config is None:
        return None
    if config.has_index:
        unused = [] if config.evicts or config.evict == HashConfig.evict else ["evict"]
        why, advice = f"no id loses its row with on_full={config.on_full!r}", "give on_full='evict' as well."
    else:
        default = _DEFAULT.resolve(config.rows, adopt=True)
        unused = [name for name in _SETTINGS if getattr(config, name) != getattr(default, name)]
        why = "every row is dense, so no id is new"
        advice = "for raw ids, give dense_rows=0, or more rows= than the table has."
    if not unused:
        return None
    settings = ", ".join(f"{name}={getattr(config, name)!r}" for name in unused)
    message = f"without effect: {settings}; {why}."
    return Diagnostic("index_settings_not_used", table.module_path, message, advice, Severity.WARNING)


def index_left_out(table: ConvertedTable) -> Diagnostic | None:
    """Hashing was elided, because no id ever reaches the index."""
    spec = table.spec
    if not spec.never_needs_index or spec.id_range is None or spec.hashing is None:
        return None
    message = (
        f"its ids are declared to be {spec.id_range}, all below dense_rows={spec.hashing.dense_rows}, so they are "
        "rows, and its index is never read."
    )
    advice = "nothing: each batch is checked. HashConfig() without more rows than the table has saves the index."
    return Diagnostic("index_left_out", table.module_path, message, advice)


def init_fn_rows(table: ConvertedTable) -> Diagnostic | None:
    """An indexed table with its own ``init_fn``."""
    if table.index is None or not table.spec.custom_init_fn:
        return None
    message = "its own init_fn fills the rows of new ids, whose first weights depend on the order in which ids come."
    advice = "leave out init_fn to have initial weights that depend on the id alone."
    return Diagnostic("init_fn_rows", table.module_path, message, advice)


def data_type_not_honoured(table: ConvertedTable) -> Diagnostic | None:
    """The config names a dtype that differs from the weight's."""
    try:
        declared = data_type_to_dtype(table.config.data_type)
    except ValueError:  # quantized types have no torch dtype
        declared = None
    if declared == table.weight.dtype:
        return None
    message = f"config.data_type is {table.config.data_type.name}, but the weight is {type_name(table.weight.dtype)}."
    advice = "cast the model, or correct the config; recfx goes by the weight's type."
    return Diagnostic("data_type_not_honoured", table.module_path, message, advice)


def virtual_table_not_followed(table: ConvertedTable) -> Diagnostic | None:
    """The config asks for a virtual table or has an eviction policy for one."""
    policy = getattr(table.config, "virtual_table_eviction_policy", None)
    if policy is None and not getattr(table.config, "use_virtual_table", False):
        return None
    is_raw = table.spec.has_index
    instead = "ids get rows by its HashConfig" if is_raw else "ids are its rows"
    message = f"{type(policy).__name__ if policy else 'use_virtual_table'} does nothing: {instead}."
    advice = (
        "use HashConfig.raw_ids() with on_full='evict' and evict='ttl' (in batches) or evict='lfu', or admit_after=."
    )
    severity = Severity.INFO if is_raw else Severity.WARNING
    return Diagnostic("virtual_table_not_followed", table.module_path, message, advice, severity)


def type_name(dtype: object) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


_RULES: tuple[Callable[[ConvertedTable], Diagnostic | None], ...] = (
    backend_unusable,
    kernel_fallback,
    no_library,
    optimizer_not_fused,
    only_touched_rows,
    weight_decay_not_applied,
    weights_not_used,
    index_settings_not_used,
    index_left_out,
    init_fn_rows,
    data_type_not_honoured,
    virtual_table_not_followed,
)
