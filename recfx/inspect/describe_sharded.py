"""The report of a sharded collection, as this rank sees it; and of what a plan would make of a converted one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from recfx.diagnostics import Diagnostic
from recfx.hashing import HashIndex
from recfx.inspect.describe import graph_fields, hashing_report, table_report
from recfx.inspect.facts import TableFacts, kernels_by_table
from recfx.inspect.index_facts import IndexFacts
from recfx.inspect.reasons import type_name
from recfx.inspect.sharding_reasons import collection_sharding_reasons, pipelining_reasons, sharding_reasons
from recfx.inspect.sharding_report import ShardingReport
from recfx.inspect.table_report import TableReport
from recfx.ir.shards import CollectionSharding, ShardedTable
from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.sharding.collection import ShardedHashEmbeddingBagCollection
from recfx.sharding.optimizer_settings import Taken, optimizer_settings
from recfx.sharding.plan import read_plan


def describe_sharded(sharded: ShardedHashEmbeddingBagCollection, path: str, existed: bool) -> dict[str, Any]:
    """The fields of a :class:`CollectionReport`; arguments as of ``describe_converted``. Communicates nothing."""
    kernels, configs = kernels_by_table(sharded.graph_module), sharded.embedding_bag_configs()
    tables = []
    for table, config in zip(sharded.sharding.tables, configs, strict=True):
        here = sharded.sharding.local_of(table.table.name)
        if not here:
            tables.append(
                _with_sharding(
                    _elsewhere(table, sharded.dtypes[table.table.name]), table, sharded.sharding, path, sharded.taken
                )
            )
            continue
        name = here[0].name  # all shards of a table on one rank have the same rows
        bag, index = sharded.embedding_bags[name], dict(sharded.hash_indexes.items()).get(name)
        assert isinstance(bag, nn.EmbeddingBag)
        assert index is None or isinstance(index, HashIndex)
        facts = TableFacts(
            module_path=_join(path, name),
            spec=table.table,
            config=config,
            bag=bag,
            weight=sharded.store.weight(name),
            index=index,
            index_facts=None if index is None else IndexFacts.of(index),
            kernel=kernels[name],
            optimizer=sharded.store.optimizers.get(name),
            existed=existed,
        )
        tables.append(_with_sharding(table_report(facts), table, sharded.sharding, path, sharded.taken))
    reasons = collection_sharding_reasons(sharded.tables, sharded.graph_module, path)
    reasons += pipelining_reasons(sharded, path)
    return {
        "is_weighted": sharded.is_weighted(),
        "device": next((table.device for table in tables if table.device), ""),
        "tables": tuple(tables),
        **graph_fields(sharded),
        "reasons": reasons + tuple(reason for table in tables for reason in table.reasons),
    }


def with_plan(
    described: dict[str, Any],
    collection: HashEmbeddingBagCollection,
    plan: Mapping[str, Any],
    rank: int,
    world_size: int,
    path: str,
) -> dict[str, Any]:
    """``describe_converted``'s fields, and what ``plan`` would do to the tables; the graph is that of one rank.

    Raises:
        ConversionError: as ``read_plan``.
    """
    sharding = read_plan(collection.tables, plan, rank, world_size, path)
    taken = optimizer_settings(collection, sharding, None).taken
    tables = tuple(
        _with_sharding(report, table, sharding, path, taken)
        for report, table in zip(described["tables"], sharding.tables, strict=True)
    )
    added = collection_sharding_reasons(collection.tables, None, path)
    reasons = tuple(reason for table in tables for reason in table.reasons)
    return {**described, "tables": tables, "reasons": added + reasons}


def _with_sharding(
    report: TableReport,
    table: ShardedTable,
    sharding: CollectionSharding,
    path: str,
    taken: Mapping[str, tuple[Taken, ...]],
) -> TableReport:
    element_bytes, module_path = _element_bytes(report), _join(path, table.table.name)
    reasons = sharding_reasons(table, module_path, report.optimizer)
    reasons += tuple(
        Diagnostic(each.reason, module_path, each.message, each.what_to_do) for each in taken.get(table.table.name, ())
    )
    return replace(
        report,
        bytes=report.rows * report.dim * element_bytes,
        sharding=ShardingReport.of(table, sharding, element_bytes),
        reasons=report.reasons + reasons,
    )


def _element_bytes(report: TableReport) -> int:
    dtype: torch.dtype = getattr(torch, report.dtype)
    return dtype.itemsize


def _elsewhere(table: ShardedTable, dtype: torch.dtype) -> TableReport:
    """A table that this rank has nothing of."""
    spec = table.table
    return TableReport(
        name=spec.name,
        features=spec.feature_names,
        embedding_names=spec.embedding_names,
        rows=spec.num_embeddings,
        dim=spec.embedding_dim,
        pooling=spec.pooling,
        dtype=type_name(dtype),
        device="",
        bytes=0,
        hashing=hashing_report(spec.hashing, None),
        custom_init_fn=spec.custom_init_fn,
    )


def _join(path: str, table: str) -> str:
    return f"{path}.embedding_bags.{table}" if path else f"embedding_bags.{table}"
