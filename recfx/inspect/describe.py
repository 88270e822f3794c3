"""The report of one collection, what is worth saying about it and how its tables are sharded, and the warnings of
``convert``.
"""

import contextlib
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of, shown_by
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.plan import plan_of_collection
from recfx.collections.sharding.ranks_agree import on_all_ranks
from recfx.collections.sharding.settings import check_optimizers
from recfx.collections.wrappers import users_path
from recfx.errors import Diagnostic, RecfxWarning, Severity, few
from recfx.errors.grid import size
from recfx.hashing import HashIndex
from recfx.inspect.report_data import CollectionReport, NodeReport, ShardingReport, TableReport, type_name
from recfx.inspect.tables import declared_table, parts_here, table_reports
from recfx.ir.meta import node_meta
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.models.conversion_record import conversion_of
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.passes import Rewriting
from recfx.planner.pricing.step_price import planned_by
from recfx.planner.topology import device_of, device_of_tables
from recfx.runtime.dedup_ids import DedupIds
from recfx.runtime.find_rows import FindRows
from recfx.runtime.transfers import crosses

LARGE_GRADIENTS = 64 * 2**20
"""Bytes of dense gradients per step from which on a report warns. With one table of 64 columns and 20,480 ids a batch,
a step of SGD took one core 3.5 ms at 16 MiB, 37 ms at 64 MiB and 136 ms at 256 MiB; 1 ms at each, in backward."""

_PACKAGE = str(Path(__file__).parents[1])


@dataclass(frozen=True)
class AsPlanned:
    """What the tables of a model would be sharded by, as one rank sees it; ``topology`` None: where the tables are."""

    plan: ShardingPlan
    rank: int
    world_size: int
    topology: Topology | None = None


def describe(
    base: CollectionReport,
    collection: nn.Module,
    existed: bool,
    planned: AsPlanned | None = None,
    for_warnings: bool = False,
) -> CollectionReport:
    """Add what a collection shows of itself, as it is or as ``planned``, to what discovery knows.

    ``existed``: whether its tables were there before recfx. ``for_warnings``: without what indexes hold, and graphs.
    """
    if not isinstance(collection, ConvertedCollection):
        return _describe_other(base, collection)
    path, tables = base.path, table_reports(collection, base.path, existed, with_indexes=not for_warnings)
    metas = {node.name: meta for node in collection.graph_module.graph.nodes if (meta := node_meta(node)) is not None}
    records = tuple(collection.pass_records)
    reasons = [] if for_warnings else list(transfer_reasons(collection, path))
    if isinstance(collection, ShardedCollection):
        parts, optimizers = parts_here(collection), collection.store.optimizers
        fused = {name: optimizers[part] for name, part in parts.items() if part in optimizers}
        every = {spec.name: declared_table(spec, collection.dtypes[spec.name]) for spec in collection.tables} | tables
        tables = _sharded(every, collection, path, collection.sharding, fused, collection.taken)
        device = next((table.device for table in tables.values() if table.device), "")
        reasons += sharded_reasons(collection, path)
    else:
        assert isinstance(collection, UnshardedCollection)
        device = str(collection.device)
        if planned is not None:
            tables, made = _as_planned(tables, base.paths, collection, planned)
            metas, records = dict(made.metas), made.records
    reasons += dense_gradient_reasons(tables.values(), path, collection.training)
    reasons += [reason for table in tables.values() for reason in table.reasons]
    return replace(
        base,
        is_weighted=collection.is_weighted(),
        device=device,
        tables=tuple(tables.values()),
        nodes=tuple(NodeReport.of(name, meta) for name, meta in metas.items()),
        graph="" if for_warnings or not records else records[-1].text,
        declined=tuple(declined for record in records for declined in record.declined),
        reasons=(*base.reasons, *reasons),
    )


def _as_planned(
    tables: dict[str, TableReport], paths: Sequence[str], collection: UnshardedCollection, planned: AsPlanned
) -> tuple[dict[str, TableReport], Rewriting]:
    """The tables of a collection as they would be sharded, and the graph of the rank that sees them so."""
    here, path = device_of_tables(collection), paths[0]
    device = here if planned.topology is None else device_of(planned.topology)
    part = planned_by(collection, plan_of_collection(planned.plan, paths), planned.world_size, device, path)
    check_optimizers(collection)
    sharding, fused, made = part.sharding.seen_from(planned.rank), part.settings.fused, part.rewriting(planned.rank)
    kernels = {name: meta.kernel for meta in made.metas.values() if meta.kernel for name in meta.tables}
    for name, report in tables.items():
        if name in fused:  # a fused kernel has an optimizer in backward, by default TorchRec's
            report = replace(report, optimizer=f"fused {fused[name].rule.name}")
        if device != here:  # what serves it now is for where it is now
            report = replace(report, kernel=kernels.get(name, ""), kernels_passed_over=())
        tables[name] = report
    return _sharded(tables, collection, path, sharding, fused, part.settings.taken), made


def _sharded(
    tables: Mapping[str, TableReport],
    collection: ConvertedCollection,
    path: str,
    sharding: CollectionSharding,
    optimizers: Mapping[str, FusedOptimizer],
    taken: Mapping[str, Sequence[Diagnostic]],
) -> dict[str, TableReport]:
    """The tables with where their parts are, and what was said when the settings of optimizers were ``taken``."""
    sharded = {}
    for table in sharding.tables:
        name, report = table.table.name, tables[table.table.name]
        dtype: torch.dtype = getattr(torch, report.dtype)
        module_path = kind_of(collection).table_path(path, name)
        reasons = [*cut_reasons(table, optimizers.get(name)), *taken.get(name, ())]
        sharded[name] = replace(
            report,
            bytes=report.rows * report.dim * dtype.itemsize,
            sharding=ShardingReport.of(table, sharding, dtype.itemsize),
            reasons=(*report.reasons, *(replace(reason, path=module_path) for reason in reasons)),
        )
    return sharded


def declared_tables(module: nn.Module) -> tuple[TableReport, ...]:
    """The tables of a collection without what their indexes show; none if it does not say which it has."""
    if isinstance(module, ConvertedCollection):
        return tuple(map(declared_table, module.tables))
    return _describe_other(CollectionReport(("",), "", ""), module).tables


def _describe_other(base: CollectionReport, collection: nn.Module) -> CollectionReport:
    """Add what a collection that was not converted shows of itself, which may be nothing."""
    module: Any = collection
    if isinstance(collection, BaseManagedCollisionEmbeddingCollection):
        module = collection._embedding_module
    names = shown_by(module)
    if names is None:
        return base
    read, holder = names
    try:
        asked = getattr(module, "is_weighted", None)  # sequences have no such thing
        modules = dict(getattr(module, holder, {}).items())
        return replace(
            base,
            is_weighted=asked() if callable(asked) else None,
            device=str(getattr(module, "device", "") or ""),
            tables=tuple(
                _table_of_config(config, getattr(modules.get(config.name), "weight", None))
                for config in getattr(module, read)()
            ),
        )
    except Exception:  # a foreign class may implement none of this; then the report has less to show
        return base


def _table_of_config(config: BaseEmbeddingConfig, weight: object) -> TableReport:
    """A table of a collection that was not converted; the weight is looked at if it is a parameter."""
    bits = DATA_TYPE_NUM_BITS[config.data_type]
    dtype, device, size = config.data_type.name, "", config.num_embeddings * config.embedding_dim * bits // 8
    if isinstance(weight, nn.Parameter):
        dtype, device, size = type_name(weight.dtype), str(weight.device), weight.numel() * weight.element_size()
    pooling = getattr(config, "pooling", None)
    return TableReport(
        name=config.name,
        features=tuple(config.feature_names),
        embedding_names=tuple(config.feature_names),
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        pooling="" if pooling is None else pooling.name,
        dtype=dtype,
        device=device,
        bytes=size,
    )


def never_called(path: str) -> Diagnostic:
    """A sample was traced, and the collection at ``path`` was not called."""
    message = "calling the model with the sample never reaches this collection, in train or eval mode."
    advice = "check the sample, or call the collection; what is converted does not depend on it."
    return Diagnostic("never_called", path, message, advice, Severity.WARNING)


def cut_reasons(table: ShardedTable, optimizer: FusedOptimizer | None) -> Iterator[Diagnostic]:
    """What is worth saying about how one table is cut."""
    pieces, config, blocks = table.row_pieces, table.table.hashing, len(table.column_blocks)
    empty = [shard.rank for shard in pieces if shard.is_empty]
    if empty and config is not None and table.table.has_index:
        message = f"its {config.buckets} buckets are split over {len(pieces)} ranks: ranks {empty} get no rows."
        advice = f"give HashConfig(buckets=...) a multiple of {len(pieces)}, before the table has learned any ids."
        yield Diagnostic("ranks_without_rows", "", message, advice, Severity.WARNING)
    elif empty:
        message = f"{table.table.num_embeddings:,} rows are split over {len(pieces)} ranks: ranks {empty} get none."
        advice = "table_wise or data_parallel serves so small a table better."
        yield Diagnostic("ranks_without_rows", "", message, advice)
    # The optimizer may keep one number per row of each column block.
    changed = None if blocks < 2 or optimizer is None else optimizer.rule.when_columns_are_cut(blocks)
    if changed is not None:
        yield Diagnostic("optimizer_state_per_column_block", "", *changed)


def sharded_reasons(sharded: ShardedCollection, path: str) -> Iterator[Diagnostic]:
    """What the graph of a sharded collection says about the ids that it sends."""
    if sharded.in_torchrecs_pipeline:  # recfx.TrainPipeline has a report of its own
        message = f"a TorchRec pipeline sends the next batch's ids ahead ({type(sharded.forward).__name__})."
        yield Diagnostic("pipelined", path, message, "nothing: detach the pipeline to have a plain forward again.")
    if any(getattr(node, "has_expanded", False) for node in sharded.graph_module.children()):
        message = "a batch had features with their own batch sizes: they are expanded before ids are sent."
        advice = "expect more ids on the wire than with TorchRec; deduplicate after the collection where that matters."
        yield Diagnostic("variable_batch_expanded", path, message, advice)
    path_of, first = partial(kind_of(sharded).table_path, path), 0
    dedup = next((node for node in sharded.graph_module.children() if isinstance(node, DedupIds)), None)
    for table in sharded.tables:
        keys = slice(first, first := first + len(table.embedding_names))
        expected, why = table.dedup.share, table.why_sent_as_they_come
        if why is not None and (table.dedup.asked or expected is not None):
            advice = "see which tables send different ids once, in the documentation of sharded collections."
            yield Diagnostic(why.code, path_of(table.name), why.message, advice)
        if dedup is None or not table.sends_different:
            continue
        different, ids = sum(dedup.different[keys]), sum(dedup.ids[keys])
        counted = f"{different / ids:.1%} of {ids:,} ids were different" if ids else "no ids were sent yet"
        forecast = "" if expected is None else f"; {expected:.1%} of all were expected to be"
        message = f"each different id of a key is sent once: in training on this rank, {counted}{forecast}."
        advice = "give the share that was measured to convert(dedup=) if it is far from the expected one."
        yield Diagnostic("ids_sent_once", path_of(table.name), message, advice)


def dense_gradient_reasons(tables: Iterable[TableReport], path: str, trains: bool) -> Iterator[Diagnostic]:
    """Tables of the collection at ``path`` whose backward writes gradients as large as they are, if these are large."""
    dense = [table for table in tables if table.has_dense_gradient] if trains else []
    written = sum(table.bytes_here for table in dense)
    if written >= LARGE_GRADIENTS:
        message = (
            f"no optimizer runs in backward for {few([table.name for table in dense], 4)}: each step of training "
            f"clears, writes and reads {size(written)} of gradients (weight.grad), as large as the tables."
        )
        advice = "call apply_optimizer_in_backward of torchrec.optim, or eval() if it is not trained."
        yield Diagnostic("dense_gradients", path, message, advice)


def transfer_reasons(collection: ConvertedCollection, path: str) -> Iterator[Diagnostic]:
    """Where the ids of the collection, which is at ``path``, are hashed, if its tables are on a device."""
    device = collection.store.device
    indexes = [index for index in collection.hash_indexes.values() if isinstance(index, HashIndex)]
    if not any(crosses(device, index.row_ids.device) for index in indexes):
        return
    nodes = [module for module in collection.graph_of(training=False).children() if isinstance(module, FindRows)]
    on_device = nodes and not any(node.finds_on_host for node in nodes)
    taken = sum(node.copies.bytes for node in nodes)
    if on_device and all(node.serves_training for node in nodes):
        modes = "copies ids that have no row to the host, where the indexes are; all others and those of eval mode are"
    else:
        modes = "copies ids to the host, where the indexes are, and their rows back (nodes to_host and to_device); in "
        modes += "eval mode they are"
    where = f"found on the device, in copies of the indexes that take {taken} bytes." if on_device else "copied, too."
    message = f"its tables are on {device}, but each forward in training {modes} {where}"
    advice = "nothing; recfx.TrainPipeline does what it can ahead, for the next batch."
    yield Diagnostic("hashed_on_host", path, message, advice)


def warn(converted: nn.Module, collections: Mapping[str, ConvertedCollection]) -> None:
    """Warn at the line that called recfx, on rank 0; if the filter makes errors of warnings, on all ranks alike."""
    conversion = conversion_of(converted)
    reasons = [*conversion.notes]
    reasons += [never_called(one.paths[0]) for one in conversion.found if one.found == "never called"]
    for path, collection in collections.items():
        reasons += describe(CollectionReport((path,), "", ""), collection, existed=False, for_warnings=True).reasons
    sharded = next((one for one in collections.values() if isinstance(one, ShardedCollection)), None)
    reasons = [reason for reason in reasons if reason.severity == Severity.WARNING]
    warned = [replace(reason, path=users_path(converted, reason.path)) for reason in reasons]
    if sharded is not None:
        of_ranks = on_all_ranks(sharded.process_group, lambda: warned, lambda error: None)
        warned = [reason for of_rank in of_ranks for reason in of_rank or ()]
    is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    for reason in warned:
        if (reason.code, reason.path) not in conversion.warned:
            conversion.warned.add((reason.code, reason.path))
            with contextlib.nullcontext() if is_first else warnings.catch_warnings(record=True):
                warnings.warn(RecfxWarning(reason), stacklevel=_frames_of_recfx())


def _frames_of_recfx() -> int:
    """The ``stacklevel`` of the first frame outside recfx, for a warning that the caller of this gives."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
