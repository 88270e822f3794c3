"""Everything that is known about one table of a converted collection: the report and its reasons are made from it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx, nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from recfx.collections.converted_collection import ConvertedCollection
from recfx.collections.kinds import kind_of
from recfx.collections.sharding.collection import ShardedCollection
from recfx.errors import ConversionError, Diagnostic
from recfx.hashing import HashIndex
from recfx.inspect.report_data import HashingReport
from recfx.ir.meta import find_module
from recfx.ir.tables import TableSpec
from recfx.optim.attached import attached_optimizers
from recfx.optim.fused_optimizer import FusedOptimizer
from recfx.optim.in_backward import fused_optimizer_of
from recfx.runtime import HashLookup, Lookup


@dataclass(frozen=True)
class Kernel:
    """The backend that serves a lookup now."""

    tables: tuple[str, ...]
    asked: str  # "auto", or the name of the backend to use
    name: str = ""  # "" if there is none
    passed_over: tuple[Diagnostic, ...] = ()  # the backends before it, and why they were not taken
    refused: Diagnostic | None = None  # why there is none


@dataclass(frozen=True)
class ConvertedTable:
    """One table of a converted collection."""

    module_path: str  # of the module that holds the weight
    spec: TableSpec
    config: BaseEmbeddingConfig
    weight: nn.Parameter
    index: HashIndex | None  # None if ids are rows
    hashing: HashingReport  # the settings alone without an index, on meta, and if no more is asked for
    kernel: Kernel
    optimizer: FusedOptimizer | Diagnostic | None  # why it is not fused, if it runs in backward
    existed: bool  # before recfx, so that it was converted rather than built directly


def table_facts(
    collection: ConvertedCollection, path: str, existed: bool, with_indexes: bool = True
) -> dict[str, ConvertedTable]:
    """The tables of a collection at ``path`` of which this rank has a part, by name; changes nothing.

    ``with_indexes``: whether to look at what the indexes hold and have counted, which takes most of the time.
    """
    parts, kind, indexes = parts_here(collection), kind_of(collection), dict(collection.hash_indexes.items())
    kernels = {table: kernel for kernel in kernels_of(collection.graph_module).values() for table in kernel.tables}
    facts = {}
    for spec, config in zip(collection.tables, kind.configs_of(collection), strict=True):
        if spec.name not in parts:
            continue
        name = parts[spec.name]
        index = indexes.get(name)
        assert index is None or isinstance(index, HashIndex)
        facts[spec.name] = ConvertedTable(
            module_path=kind.table_path(path, name),
            spec=spec,
            config=config,
            weight=collection.weight(name),
            index=index,
            hashing=HashingReport.of(spec.hashing, index if with_indexes else None),
            kernel=kernels[name],
            optimizer=_optimizer(collection, name, kind.table_path(path, name)),
            existed=existed,
        )
    return facts


def parts_here(collection: ConvertedCollection) -> dict[str, str]:
    """The collection's name for this rank's part of each table of which it has one, by name of the table."""
    if not isinstance(collection, ShardedCollection):
        return {table.name: table.name for table in collection.tables}
    local = {table.name: collection.sharding.local_of(table.name) for table in collection.tables}
    return {name: shards[0].name for name, shards in local.items() if shards}  # all shards here have the same rows


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


def _optimizer(collection: ConvertedCollection, table: str, path: str) -> FusedOptimizer | Diagnostic | None:
    fused = collection.store.optimizers.get(table)
    weight = collection.weight(table)
    if fused is not None or collection.is_sharded or not attached_optimizers(weight):
        return fused
    # It was attached after the conversion; the next forward takes it over.
    return collection.not_fused.get(table) or fused_optimizer_of(weight, path)
