"""Fills the report of one collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of, shown_by
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.plan import plan_of_collection, read_plan
from recfx.collections.sharding.settings import check_optimizers, optimizer_settings
from recfx.errors import Diagnostic
from recfx.inspect.collection_reasons import (
    cut_reasons,
    dense_gradient_reasons,
    sharded_reasons,
    transfer_reasons,
)
from recfx.inspect.report_data import (
    CollectionReport,
    NodeReport,
    ShardingReport,
    TableReport,
    type_name,
)
from recfx.inspect.tables import declared_table, parts_here, table_reports
from recfx.ir.meta import node_meta
from recfx.ir.shards import CollectionSharding
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.passes import Rewriting
from recfx.planner.pricing.planned_collection import planned_with
from recfx.planner.topology import AnyTopology, device_of, device_of_tables


@dataclass(frozen=True)
class AsPlanned:
    """What the tables of a model would be sharded by, as one of the ranks sees it.

    ``topology`` has the devices; None: those of the tables.
    """

    plan: ShardingPlan
    rank: int
    world_size: int
    topology: AnyTopology | None = None


def describe(
    base: CollectionReport,
    collection: nn.Module,
    existed: bool,
    planned: AsPlanned | None = None,
    with_indexes: bool = True,
) -> CollectionReport:
    """Add what a collection shows of itself to what discovery knows; nothing is communicated.

    Args:
        base: what discovery knows.
        collection: the collection as it is, or as it would be converted.
        existed: whether its tables were there before recfx.
        planned: how it would be sharded: its graph is then that of one rank.
        with_indexes: whether to look at what the indexes hold and have counted, which takes most of the time.

    Raises:
        ConversionError: as ``shard_collection``, in its order; ``malformed_graph``: the user's passes left one.
    """
    if not isinstance(collection, ConvertedCollection):
        return _describe_other(base, collection)
    path, tables = base.path, table_reports(collection, base.path, existed, with_indexes)
    metas = {node.name: meta for node in collection.graph_module.graph.nodes if (meta := node_meta(node)) is not None}
    records, reasons = tuple(collection.pass_records), list(transfer_reasons(collection, path))
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
        graph=records[-1].text if records else "",
        declined=tuple(declined for record in records for declined in record.declined),
        reasons=(*base.reasons, *reasons),
    )


def _as_planned(
    tables: dict[str, TableReport], paths: Sequence[str], collection: UnshardedCollection, planned: AsPlanned
) -> tuple[dict[str, TableReport], Rewriting]:
    """The tables of a collection as they would be sharded, and the graph of the rank that sees them so."""
    plan, path = plan_of_collection(planned.plan, paths), paths[0]
    sharding = read_plan(collection.tables, plan, planned.rank, planned.world_size, path)
    check_optimizers(collection)
    settings = optimizer_settings(collection, sharding, None, dense_as_torchrec=False)
    here = device_of_tables(collection)
    device = here if planned.topology is None else device_of(planned.topology)
    made = planned_with(collection, path, sharding, device).rewriting(planned.rank)
    kernels = {name: meta.kernel for meta in made.metas.values() if meta.kernel for name in meta.tables}
    for name, report in tables.items():
        if name in settings.fused:  # a fused kernel has an optimizer in backward, by default TorchRec's
            report = replace(report, optimizer=f"fused {settings.fused[name].rule.name}")
        if device != here:  # what serves it now is for where it is now
            report = replace(report, kernel=kernels.get(name, ""), kernels_passed_over=())
        tables[name] = report
    return _sharded(tables, collection, path, sharding, settings.fused, settings.taken), made


def _sharded(
    tables: Mapping[str, TableReport],
    collection: ConvertedCollection,
    path: str,
    sharding: CollectionSharding,
    optimizers: Mapping[str, FusedOptimizer],
    taken: Mapping[str, Sequence[Diagnostic]],
) -> dict[str, TableReport]:
    """The tables with where their parts are, and what is worth saying about that.

    Args:
        tables: all tables of the collection, by name.
        collection: the collection.
        path: where it is.
        sharding: how it is sharded.
        optimizers: the fused optimizers of this rank's parts, by name of the table.
        taken: what was said when the settings of optimizers were chosen, by name of the table.
    """
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
