"""Fills the report of a sharded collection as this rank sees it, or as it would be under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from recfx.collections.collection import UnshardedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import ShardedCollection
from recfx.collections.sharding.optimizer_settings import check_optimizers, optimizer_settings
from recfx.collections.sharding.plan import read_plan
from recfx.errors import Diagnostic
from recfx.inspect.collection_reasons import collection_sharding_reasons, pipelining_reasons, sharding_reasons
from recfx.inspect.describe import declared_table, table_report, with_graph, with_nodes, with_reasons
from recfx.inspect.facts import table_facts
from recfx.inspect.report_data import CollectionReport
from recfx.inspect.table_report import ShardingReport, TableReport
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.planner.pricing.planned_collection import planned_facts, planned_graph, planned_with
from recfx.planner.topology import AnyTopology, chip_of, device_of, device_of_tables


def describe_sharded(found: CollectionReport, sharded: ShardedCollection, existed: bool) -> CollectionReport:
    """Add what a sharded collection shows on this rank; the arguments are those of ``describe_converted``.

    Does not communicate.
    """
    local = {table.name: sharded.sharding.local_of(table.name) for table in sharded.tables}
    own = {name: shards[0].name for name, shards in local.items() if shards}  # all shards here have the same rows
    facts = table_facts(sharded, own, found.path, existed)
    path_of = partial(kind_of(sharded).table_path, found.path)
    tables = []
    for table in sharded.sharding.tables:
        name = table.table.name
        report = table_report(facts[name]) if name in facts else declared_table(table.table, sharded.dtypes[name])
        optimizer = sharded.store.optimizers.get(own.get(name, ""))
        tables.append(_with_sharding(report, table, optimizer, sharded.sharding, path_of(name), sharded.taken))
    described = replace(
        found,
        is_weighted=sharded.is_weighted(),
        device=next((table.device for table in tables if table.device), ""),
        tables=tuple(tables),
    )
    reasons = collection_sharding_reasons(sharded.tables, sharded.graph_module, found.path)
    return with_reasons(with_graph(described, sharded), reasons + pipelining_reasons(sharded, found.path))


def with_plan(
    described: CollectionReport,
    collection: UnshardedCollection,
    plan: Mapping[str, Any],
    rank: int,
    world_size: int,
    topology: AnyTopology | None = None,
) -> CollectionReport:
    """Add what ``plan`` would do to the tables of a collection that ``describe_converted`` has described.

    The graph is that of one rank.

    Args:
        described: what is known of the collection now.
        collection: the collection, unsharded.
        plan: how each of its tables is sharded.
        rank: the rank.
        world_size: the number of ranks.
        topology: what the plan was made for, which the nodes are for then; None: for the device of the tables.

    Raises:
        ConversionError: the same as ``shard_collection``, in its order; ``malformed_graph``: passes of the user's left
            one.
    """
    path = described.path
    sharding = read_plan(collection.tables, plan, rank, world_size, path)
    check_optimizers(collection)
    settings = optimizer_settings(collection, sharding, None, dense_as_torchrec=False)
    fused = collection.fused_optimizers()
    path_of = partial(kind_of(collection).table_path, path)
    tables = tuple(
        _with_sharding(report, table, fused.get(table.table.name), sharding, path_of(table.table.name), settings.taken)
        for report, table in zip(described.tables, sharding.tables, strict=True)
    )
    device = device_of_tables(collection) if topology is None else device_of(topology)
    planned = planned_with(collection, path, sharding, planned_facts(collection, sharding, device))
    rewriting = planned_graph(planned, rank, chip_of(topology, device))
    described = with_nodes(described, rewriting.metas, rewriting.records)
    reasons = collection_sharding_reasons(collection.tables, None, path)
    return with_reasons(replace(described, tables=tables), reasons)


def _with_sharding(
    report: TableReport,
    table: ShardedTable,
    optimizer: FusedOptimizer | None,
    sharding: CollectionSharding,
    module_path: str,
    taken: Mapping[str, tuple[Diagnostic, ...]],
) -> TableReport:
    element_bytes = _element_bytes(report)
    reasons = sharding_reasons(table, module_path, optimizer)
    reasons += tuple(replace(each, path=module_path) for each in taken.get(table.table.name, ()))
    return replace(
        report,
        bytes=report.rows * report.dim * element_bytes,
        sharding=ShardingReport.of(table, sharding, element_bytes),
        reasons=report.reasons + reasons,
    )


def _element_bytes(report: TableReport) -> int:
    dtype: torch.dtype = getattr(torch, report.dtype)
    return dtype.itemsize
