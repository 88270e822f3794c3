"""Fills the report of an unsharded collection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from recfx.collections.collection import UnshardedCollection
from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of, shown_by
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.optimizer_settings import check_optimizers, optimizer_settings
from recfx.collections.sharding.plan import read_plan
from recfx.errors import Diagnostic
from recfx.inspect.collection_reasons import (
    dense_gradient_reasons,
    expanded_reasons,
    pipelining_reasons,
    sent_once_reasons,
    sharding_reasons,
    transfer_reasons,
)
from recfx.inspect.facts import ConvertedTable, parts_here, table_facts
from recfx.inspect.reasons import table_reasons, type_name
from recfx.inspect.report_data import CollectionReport, NodeReport
from recfx.inspect.table_report import DENSE, HashingReport, ShardingReport, TableReport
from recfx.ir.meta import NodeMeta, node_meta
from recfx.ir.operator_graph import lowered_from
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.ir.tables import TableSpec
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.passes.base import PassRecord
from recfx.planner.pricing.planned_collection import planned_with
from recfx.planner.topology import AnyTopology, chip_of, device_of, device_of_tables


def declared_tables(module: nn.Module) -> tuple[TableReport, ...]:
    """The tables of a collection, or of the graph of a converted one, as they are declared: no weight is looked at.

    None if it does not say which tables it has.
    """
    if isinstance(module, ConvertedCollection):
        return tuple(map(declared_table, module.tables))
    if isinstance(module, fx.GraphModule):
        operators = filter(None, map(lowered_from, module.graph.nodes))
        specs = next((operator.graph.collection(operator.node).tables for operator in operators), ())
        return tuple(map(declared_table, specs))
    names = shown_by(module)
    try:
        return () if names is None else tuple(_table_of_config(config, None) for config in getattr(module, names[0])())
    except Exception:  # a foreign class may implement none of this; then there is less to show
        return ()


def declared_table(spec: TableSpec, dtype: torch.dtype | None = None) -> TableReport:
    """A table of a converted collection without what its weight, which may be of another dtype, and its index show."""
    return TableReport(
        name=spec.name,
        features=spec.feature_names,
        embedding_names=spec.embedding_names,
        rows=spec.num_embeddings,
        dim=spec.embedding_dim,
        pooling=spec.pooling,
        dtype=type_name(dtype or spec.dtype),
        device="",
        bytes=0,
        hashing=HashingReport.of(spec.hashing),
        custom_init_fn=spec.custom_init_fn,
    )


def table_report(facts: ConvertedTable) -> TableReport:
    """A table of a converted collection, or this rank's part of one."""
    weight = facts.weight
    return replace(
        declared_table(facts.spec, weight.dtype),
        device=str(weight.device),
        bytes=weight.numel() * weight.element_size(),
        hashing=facts.hashing,
        kernel=facts.kernel.name,
        kernels_passed_over=facts.kernel.passed_over,
        optimizer=_optimizer(facts),
        reasons=table_reasons(facts),
    )


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


def _optimizer(facts: ConvertedTable) -> str:
    if isinstance(facts.optimizer, FusedOptimizer):
        return _fused(facts.optimizer)
    if isinstance(facts.optimizer, Diagnostic):
        return f"in backward, not fused: {facts.optimizer.code}"
    return DENSE if facts.weight.requires_grad else "none: frozen"


def describe_converted(base: CollectionReport, collection: UnshardedCollection, existed: bool) -> CollectionReport:
    """Add what the collection shows of itself to what discovery knows, but no reasons yet.

    ``existed``: whether its tables were there before recfx.
    """
    facts = table_facts(collection, base.path, existed)
    described = replace(
        base,
        is_weighted=collection.is_weighted(),
        device=str(collection.device),
        tables=tuple(table_report(facts[table.name]) for table in collection.tables),
    )
    return with_graph(described, collection)


def describe_other(base: CollectionReport, collection: nn.Module) -> CollectionReport:
    """Add what a collection that was not converted shows of itself, which may be nothing."""
    if isinstance(collection, BaseManagedCollisionEmbeddingCollection):
        collection = collection._embedding_module
    names = shown_by(collection)
    if names is None:
        return base
    read, holder = names
    try:
        configs = list(getattr(collection, read)())
        asked = getattr(collection, "is_weighted", None)  # sequences have no such thing
        is_weighted = asked() if callable(asked) else None
        device = str(getattr(collection, "device", "") or "")
        modules = dict(getattr(collection, holder, {}).items())
        tables = tuple(
            _table_of_config(config, getattr(modules.get(config.name), "weight", None)) for config in configs
        )
    except Exception:  # a foreign class may implement none of this; then the report has less to show
        return base
    return replace(base, is_weighted=is_weighted, device=device, tables=tables)


def with_graph(described: CollectionReport, collection: ConvertedCollection) -> CollectionReport:
    """Add what became of the collection's graph, and how, and what its graph says about devices."""
    metas = {node.name: meta for node in collection.graph_module.graph.nodes if (meta := node_meta(node)) is not None}
    reasons = described.reasons + transfer_reasons(collection, described.path)
    return replace(with_nodes(described, metas, collection.pass_records), reasons=reasons)


def with_nodes(
    described: CollectionReport, metas: Mapping[str, NodeMeta], records: Sequence[PassRecord]
) -> CollectionReport:
    """Show the nodes of another graph, given by their metadata, and the passes that made it."""
    return replace(
        described,
        nodes=tuple(_node(name, meta) for name, meta in metas.items()),
        graph=records[-1].text if records else "",
        declined=tuple(declined for record in records for declined in record.declined),
    )


def with_reasons(
    described: CollectionReport, collection: ConvertedCollection, reasons: tuple[Diagnostic, ...] = ()
) -> CollectionReport:
    """Add the reasons about the collection as a whole, then those about its tables."""
    reasons += dense_gradient_reasons(described.tables, described.path, collection.training)
    of_tables = tuple(reason for table in described.tables for reason in table.reasons)
    return replace(described, reasons=described.reasons + reasons + of_tables)


def _node(name: str, meta: NodeMeta) -> NodeReport:
    dtype = "" if meta.dtype is None else type_name(meta.dtype)
    return NodeReport(
        name, meta.kind, meta.tables, meta.made_by, meta.shape, dtype, meta.bytes, meta.device, meta.kernel
    )


def describe_sharded(base: CollectionReport, sharded: ShardedCollection, existed: bool) -> CollectionReport:
    """Add what a sharded collection shows on this rank; arguments as for ``describe_converted``.

    Does not communicate.
    """
    facts, reasons_of = table_facts(sharded, base.path, existed), reasons_of_sharding(sharded, base.path)
    tables = []
    for table in sharded.sharding.tables:
        name = table.table.name
        report = table_report(facts[name]) if name in facts else declared_table(table.table, sharded.dtypes[name])
        tables.append(_with_sharding(report, table, sharded.sharding, reasons_of[name]))
    described = replace(
        base,
        is_weighted=sharded.is_weighted(),
        device=next((table.device for table in tables if table.device), ""),
        tables=tuple(tables),
    )
    reasons = expanded_reasons(sharded.graph_module, base.path)
    reasons += pipelining_reasons(sharded, base.path) + sent_once_reasons(sharded, base.path)
    return with_reasons(with_graph(described, sharded), sharded, reasons)


def reasons_of_sharding(sharded: ShardedCollection, path: str) -> dict[str, tuple[Diagnostic, ...]]:
    """What is worth saying about how each table of a collection at ``path`` is sharded, by name of the table."""
    parts, path_of = parts_here(sharded), partial(kind_of(sharded).table_path, path)
    return {
        name: _reasons_of_table(
            table, path_of(name), sharded.store.optimizers.get(parts.get(name, "")), sharded.taken.get(name, ())
        )
        for table in sharded.sharding.tables
        for name in (table.table.name,)
    }


def _reasons_of_table(
    table: ShardedTable, path: str, optimizer: FusedOptimizer | None, taken: tuple[Diagnostic, ...]
) -> tuple[Diagnostic, ...]:
    """With what was said when the settings of the table's optimizer were chosen."""
    return sharding_reasons(table, path, optimizer) + tuple(replace(reason, path=path) for reason in taken)


def with_plan(
    described: CollectionReport,
    collection: UnshardedCollection,
    plan: Mapping[str, Any],
    rank: int,
    world_size: int,
    topology: AnyTopology | None = None,
) -> CollectionReport:
    """Add what ``plan`` would do to the tables of a collection that ``describe_converted`` has described.

    The graph is that of one rank, on the devices of the topology or else of the tables.

    Raises:
        ConversionError: as ``shard_collection``, in its order; ``malformed_graph``: the user's passes left one.
    """
    path = described.path
    sharding = read_plan(collection.tables, plan, rank, world_size, path)
    check_optimizers(collection)
    settings = optimizer_settings(collection, sharding, None, dense_as_torchrec=False)
    path_of = partial(kind_of(collection).table_path, path)
    tables = []
    for report, table in zip(described.tables, sharding.tables, strict=True):
        optimizer = settings.fused.get(report.name)
        if optimizer is not None:  # a fused kernel has an optimizer in backward, by default TorchRec's
            report = replace(report, optimizer=_fused(optimizer))
        reasons = _reasons_of_table(table, path_of(report.name), optimizer, settings.taken.get(report.name, ()))
        tables.append(_with_sharding(report, table, sharding, reasons))
    device = device_of_tables(collection) if topology is None else device_of(topology)
    rewriting = planned_with(collection, path, sharding, device, chip_of(topology, device)).rewriting(rank)
    described = with_nodes(described, rewriting.metas, rewriting.records)
    if device != device_of_tables(collection):  # what serves them now is for where they are now
        kernels = {name: meta.kernel for meta in rewriting.metas.values() if meta.kernel for name in meta.tables}
        tables = [replace(table, kernel=kernels.get(table.name, ""), kernels_passed_over=()) for table in tables]
    return with_reasons(replace(described, tables=tuple(tables)), collection)


def _fused(optimizer: FusedOptimizer) -> str:
    return f"fused {optimizer.rule.name}"


def _with_sharding(
    report: TableReport,
    table: ShardedTable,
    sharding: CollectionSharding,
    reasons: tuple[Diagnostic, ...],
) -> TableReport:
    dtype: torch.dtype = getattr(torch, report.dtype)
    return replace(
        report,
        bytes=report.rows * report.dim * dtype.itemsize,
        sharding=ShardingReport.of(table, sharding, dtype.itemsize),
        reasons=report.reasons + reasons,
    )
