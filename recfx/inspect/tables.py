"""The tables of a collection as rows of the report, with everything that is worth saying about each."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import fx, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.errors import ConversionError, Diagnostic, Severity
from recfx.hashing import HashConfig, HashIndex
from recfx.inspect.report_data import DENSE, HashingReport, TableReport, type_name
from recfx.ir.meta import find_module
from recfx.ir.tables import TableSpec
from recfx.kernels.build import library
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.fused_params import weight_decay_left_out
from recfx.optim.in_backward import fused_optimizer_of
from recfx.runtime.hash_ids import HashLookup
from recfx.runtime.lookup import Lookup

_DEFAULT, _SETTINGS = HashConfig(), [field.name for field in fields(HashConfig)]
NEARLY_FULL = 0.8  # share of the rows of the fullest bucket
CHURN = 0.1  # share of sightings that took over another id's row
FORGOTTEN = 0.5  # share of the ids that got a row and have lost it again
MUCH_SHARED = 0.01  # of the sightings in training


@dataclass(frozen=True)
class Kernel:
    """The backend that serves a lookup now."""

    tables: tuple[str, ...]
    asked: str  # "auto", or the name of the backend to use
    name: str = ""  # "" if there is none
    passed_over: tuple[Diagnostic, ...] = ()  # the backends before it, and why they were not taken
    refused: Diagnostic | None = None  # why there is none


def kernels_of(graph_module: fx.GraphModule) -> dict[str, Kernel]:
    """The kernel that each lookup uses now, by name of the node: tables may have moved since the graph was lowered."""
    kernels = {}
    for node in graph_module.graph.nodes:
        module = find_module(graph_module, node)
        lookup = module.lookup if isinstance(module, HashLookup) else module
        if isinstance(lookup, Lookup):
            tables = tuple(table.name for table in lookup.tables)
            try:
                choice = lookup.select(lookup.backend)
                kernels[node.name] = Kernel(tables, lookup.backend, choice.backend, choice.declined)
            except ConversionError as error:
                kernels[node.name] = Kernel(tables, lookup.backend, refused=error.diagnostic)
    return kernels


def parts_here(collection: ConvertedCollection) -> dict[str, str]:
    """The collection's name for this rank's part of each table of which it has one, by name of the table."""
    local = {table.name: collection.sharding.local_of(table.name) for table in collection.tables}
    return {name: shards[0].name for name, shards in local.items() if shards}  # all shards here have the same rows


def declared_table(spec: TableSpec, dtype: torch.dtype | None = None) -> TableReport:
    """A table of a converted collection without what its weight, which may be of another dtype, and its index show."""
    return TableReport(
        name=spec.name, features=spec.feature_names, embedding_names=spec.embedding_names, rows=spec.num_embeddings,
        dim=spec.embedding_dim, pooling=spec.pooling, dtype=type_name(dtype or spec.dtype), device="", bytes=0,
        hashing=HashingReport.of(spec.hashing), custom_init_fn=spec.custom_init_fn,
    )  # fmt: skip


@dataclass(frozen=True)
class _Table:
    """One table of a converted collection, of which this rank has a part."""

    path: str  # of the module that holds the weight
    spec: TableSpec
    config: BaseEmbeddingConfig
    weight: nn.Parameter
    index: HashIndex | None  # None if ids are rows
    kernel: Kernel
    optimizer: FusedOptimizer | Diagnostic | None  # why it is not fused, if it runs in backward
    existed: bool  # before recfx, so that it was converted rather than built directly
    report: TableReport  # without reasons


def table_reports(
    collection: ConvertedCollection, path: str, existed: bool, with_indexes: bool = True
) -> dict[str, TableReport]:
    """The tables of a collection at ``path`` of which this rank has a part, by name; changes nothing.

    ``existed``: whether they were there before recfx. ``with_indexes``: whether to look at what their indexes hold.
    """
    parts, kind, indexes = parts_here(collection), kind_of(collection), dict(collection.hash_indexes.items())
    kernels = {table: kernel for kernel in kernels_of(collection.graph_module).values() for table in kernel.tables}
    reports = {}
    for spec, config in zip(collection.tables, kind.configs_of(collection), strict=True):
        if spec.name not in parts:
            continue
        name = parts[spec.name]
        index, weight, kernel = indexes.get(name), collection.weight(name), kernels[name]
        assert index is None or isinstance(index, HashIndex)
        module_path = kind.table_path(path, name)
        optimizer = _optimizer(collection, name, module_path)
        text = DENSE if weight.requires_grad else "none: frozen"
        if isinstance(optimizer, FusedOptimizer):
            text = f"fused {optimizer.rule.name}"
        elif optimizer is not None:
            text = f"in backward, not fused: {optimizer.code}"
        report = replace(
            declared_table(spec, weight.dtype), device=str(weight.device),
            bytes=weight.numel() * weight.element_size(),
            hashing=HashingReport.of(spec.hashing, index if with_indexes else None), kernel=kernel.name,
            kernels_passed_over=kernel.passed_over, optimizer=text,
        )  # fmt: skip
        table = _Table(module_path, spec, config, weight, index, kernel, optimizer, existed, report)
        parts_of = (_kernel_reasons, _optimizer_reasons, _hashing_reasons, _config_reasons, _index_reasons)
        reasons = tuple(replace(reason, path=module_path) for part in parts_of for reason in part(table))
        reports[spec.name] = replace(report, reasons=reasons)
    return reports


def _optimizer(collection: ConvertedCollection, table: str, path: str) -> FusedOptimizer | Diagnostic | None:
    fused = collection.store.optimizers.get(table)
    weight = collection.weight(table)
    if fused is not None or collection.is_sharded or not attached_optimizers(weight):
        return fused
    # It was attached after the conversion; the next forward takes it over.
    return collection.not_fused.get(table) or fused_optimizer_of(weight, path)


def _kernel_reasons(table: _Table) -> Iterator[Diagnostic]:
    if table.kernel.refused is not None:
        yield table.kernel.refused
    if table.weight.is_meta:
        return
    if table.kernel.name == "reference" and table.kernel.passed_over:
        why = " ".join(f"{declined.by}: {declined.message}" for declined in table.kernel.passed_over)
        message, advice = f"the reference kernel serves it. {why}", "expect a slower lookup, or change what it names."
        yield Diagnostic("kernel_fallback", "", message, advice, Severity.WARNING)
    yield from (declined for declined in table.kernel.passed_over if declined.code == "not_measured")
    why = library.why_not()
    if why and table.weight.device.type == "cpu":
        message = f"recfx's C++ library is missing: {why}. It is looked up without it, which is slower."
        yield Diagnostic("no_library", "", message, library.WHAT_TO_DO, Severity.WARNING)


def _optimizer_reasons(table: _Table) -> Iterator[Diagnostic]:
    optimizer = table.optimizer
    if isinstance(optimizer, Diagnostic):  # it runs in backward on the whole table
        yield Diagnostic("optimizer_not_fused", "", optimizer.message, optimizer.what_to_do, Severity.WARNING)
    if not isinstance(optimizer, FusedOptimizer):
        return
    if unlike_dense := optimizer.rule.unlike_dense(optimizer.group):
        message = f"fused {unlike_dense} updates only rows that a batch reads; the dense torch optimizer updates all."
        yield Diagnostic("only_touched_rows", "", message, "nothing, unless you rely on the dense rule.")
    if optimizer.left_out:
        yield weight_decay_left_out(optimizer, table.path)


def _hashing_reasons(table: _Table) -> Iterator[Diagnostic]:
    """Weights and settings that are not used."""
    spec, config, index = table.spec, table.spec.hashing, table.index
    starts_anew = index is not None and index.config.dense_rows == 0 and not spec.custom_init_fn
    if starts_anew and table.existed and not table.weight.is_meta:
        message = "with raw_ids() (dense_rows=0), the table starts anew: each new id overwrites a row."
        advice = "nothing, if the table was not trained before; if ids were row numbers, leave out raw_ids()."
        yield Diagnostic("weights_not_used", "", message, advice)
    if config is not None and config.has_index:
        unused = [] if config.evicts or config.evict == HashConfig.evict else ["evict"]
        why, advice = f"no id loses its row with on_full={config.on_full!r}", "give on_full='evict' as well."
    elif config is not None:
        default = _DEFAULT.resolve(config.rows, adopt=True)
        unused = [name for name in _SETTINGS if getattr(config, name) != getattr(default, name)]
        why = "every row is dense, so no id is new"
        advice = "for raw ids, give dense_rows=0, or more rows= than the table has."
    if config is not None and unused:
        settings = ", ".join(f"{name}={getattr(config, name)!r}" for name in unused)
        message = f"without effect: {settings}; {why}."
        yield Diagnostic("index_settings_not_used", "", message, advice, Severity.WARNING)


def _config_reasons(table: _Table) -> Iterator[Diagnostic]:
    """What the table's config declares, and recfx does not follow."""
    config = table.config
    try:
        declared = data_type_to_dtype(config.data_type)
    except ValueError:  # quantized types have no torch dtype
        declared = None
    if declared != table.weight.dtype:
        message = f"config.data_type is {config.data_type.name}, but the weight is {table.report.dtype}."
        advice = "cast the model, or correct the config; recfx goes by the weight's type."
        yield Diagnostic("data_type_not_honoured", "", message, advice)
    policy = getattr(config, "virtual_table_eviction_policy", None)
    if policy is not None or getattr(config, "use_virtual_table", False):
        is_raw = table.spec.has_index
        instead = "ids get rows by its HashConfig" if is_raw else "ids are its rows"
        message = f"{type(policy).__name__ if policy else 'use_virtual_table'} does nothing: {instead}."
        advice = "use HashConfig.raw_ids() with on_full='evict' and evict='ttl' (in batches) or 'lfu', or admit_after=."
        severity = Severity.INFO if is_raw else Severity.WARNING
        yield Diagnostic("virtual_table_not_followed", "", message, advice, severity)


def _index_reasons(table: _Table) -> Iterator[Diagnostic]:
    """Whether an index, or this rank's slice of it, has enough rows, judged by all training since it was built."""
    index = table.report.hashing
    if index is None or index.ids_held is None:
        return
    seen, shared, is_full = index.trained["ids_seen"], index.trained["shared_answers"], index.full_bucket is not None
    nearly_full = (index.worst_bucket_occupancy or 0.0) >= NEARLY_FULL
    again = f"{'convert the model' if table.existed else 'build the table'} anew with"
    rows = 2 * (index.rows or table.spec.num_embeddings)
    more_rows = f"save a checkpoint, {again} HashConfig(rows={rows}) or more, and load it: rows move with their ids."
    if is_full:  # no batch has been trained since
        message = (
            f"training has stopped: the last batch had more new ids for bucket {index.full_bucket} than free rows; "
            f"{index.ids_held:,} of {index.index_rows:,} rows of the table are taken."
        )
        yield Diagnostic("table_full", "", message, more_rows, Severity.ERROR)
    if nearly_full and not (index.evict or shared or is_full):  # otherwise, other reasons say so
        message = (
            f"{index.ids_held:,} of {index.index_rows:,} rows are taken, {index.worst_bucket_occupancy:.1%} of the "
            f"fullest bucket; when it is full, {'training stops' if index.on_full == 'error' else 'ids share rows'}."
        )
        yield Diagnostic("index_nearly_full", "", message, more_rows, Severity.WARNING)
    if shared:
        message = f"{_part(shared, seen)} ids seen in training found their bucket full and read a row that others use."
        severity = Severity.WARNING if shared >= MUCH_SHARED * seen else Severity.INFO
        yield Diagnostic("shared_answers", "", message, more_rows, severity)
    inserted, evicted = index.trained["inserted"], index.trained["evicted"]
    # Where ids expire, they are meant to lose their rows, unless most rows are taken.
    if evicted and evicted >= FORGOTTEN * inserted and (nearly_full or not index.ttl_batches):
        message = f"{_part(evicted, inserted)} ids that got a row took it from another id, which will start anew."
        advice = f"{more_rows[:-1]}; or keep rare ids out with admit_after={2 * (index.admit_after or 1)}."
        severity = Severity.WARNING if evicted >= CHURN * seen else Severity.INFO
        yield Diagnostic("eviction_churn", "", message, advice, severity)
    if unseen := index.evaluated["unseen_answers"]:
        read, other = ("another id's row", "zeros") if index.unseen == "share" else ("zeros", "share")
        message = f"{_part(unseen, index.evaluated['ids_seen'])} ids seen in eval mode had no row and read {read}."
        yield Diagnostic("unseen_answers", "", message, f"train on them, or use unseen={other!r}.")


def _part(count: int, total: int) -> str:
    return f"{count:,} of {total:,} ({100 * count / max(total, 1):.1f}%)"
