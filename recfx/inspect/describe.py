"""Fills the report of one collection."""

from __future__ import annotations

from collections.abc import Sequence
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
    dense_gradient_reasons,
    sharded_reasons,
    sharding_reasons,
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
        tables = _sharded_tables(collection, path, tables)
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
    settings, here = (
        optimizer_settings(collection, sharding, None, dense_as_torchrec=False),
        device_of_tables(collection),
    )
    device = here if planned.topology is None else device_of(planned.topology)
    made = planned_with(collection, path, sharding, device).rewriting(planned.rank)
    kernels = {name: meta.kernel for meta in made.metas.values() if meta.kernel for name in meta.tables}
    sharded = {}
    for table in sharding.tables:
        name = table.table.name
        report, optimizer = tables[name], settings.fused.get(name)
        if optimizer is not None:  # a fused kernel has an optimizer in backward, by default TorchRec's
            report = replace(report, optimizer=f"fused {optimizer.rule.name}")
        if device != here:  # what serves it now is for where it is now
            report = replace(report, kernel=kernels.get(name, ""), kernels_passed_over=())
        reasons = sharding_reasons(
            table, kind_of(collection).table_path(path, name), optimizer, settings.taken.get(name, ())
        )
        sharded[name] = _with_sharding(report, sharding, reasons)
    return sharded, made


def _with_sharding(report: TableReport, sharding: CollectionSharding, reasons: tuple[Diagnostic, ...]) -> TableReport:
    dtype: torch.dtype = getattr(torch, report.dtype)
    return replace(
        report,
        bytes=report.rows * report.dim * dtype.itemsize,
        sharding=ShardingReport.of(sharding.named(report.name), sharding, dtype.itemsize),
        reasons=report.reasons + reasons,
    )


def _sharded_tables(sharded: ShardedCollection, path: str, here: dict[str, TableReport]) -> dict[str, TableReport]:
    """All tables of a collection at ``path``, also those of which this rank has no part."""
    parts, kind, tables = parts_here(sharded), kind_of(sharded), {}
    for spec in sharded.tables:
        name = spec.name
        optimizer = sharded.store.optimizers.get(parts.get(name, ""))
        taken = sharded.taken.get(name, ())
        reasons = sharding_reasons(sharded.sharding.named(name), kind.table_path(path, name), optimizer, taken)
        report = here[name] if name in here else declared_table(spec, sharded.dtypes[name])
        tables[name] = _with_sharding(report, sharded.sharding, reasons)
    return tables


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
