"""From a collection to its graph: context, rewrites, lowering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from recfx import passes
from recfx.ir.context import CollectionContext
from recfx.ir.facts import TableFacts
from recfx.ir.meta import SourceLocation
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.shards import CollectionSharding
from recfx.ir.tables import TableSpec
from recfx.nodes.lower_graph import lower_graph
from recfx.nodes.resources import Resources
from recfx.passes.base import PASSES_KEY
from recfx.rewrites.base import Rewrite, run_rewrites


def compile_graph(
    graph: OperatorGraph, resources: Resources, backend: str, rewrites: Sequence[Rewrite] | None = None
) -> fx.GraphModule:
    """The graph of a collection as it runs; its ``meta["recfx_passes"]`` has the records of the passes.

    Args:
        graph: the graph before the first pass.
        resources: the tables and process groups of its collection.
        backend: ``"auto"``, or the one backend that every lookup must use.
        rewrites: the passes; None: all of ``recfx.passes()``.

    Raises:
        ConversionError: ``unknown_backend``, ``backend_unusable``, ``table_shape_changed``.
    """
    made = run_rewrites(graph, passes.passes() if rewrites is None else rewrites)
    graph_module = lower_graph(made.graph, made.metas, resources, backend)
    graph_module.meta[PASSES_KEY] = made.records
    return graph_module


def context_of(
    collection: str,
    tables: tuple[TableSpec, ...],
    is_weighted: bool,
    resources: Resources,
    source: SourceLocation | None = None,
    sharding: CollectionSharding | None = None,
) -> CollectionContext:
    """What there is to say of a collection whose tables are here.

    Args:
        collection: fully qualified name in the user's model; ``""`` for a root.
        tables: its tables, whole, in order.
        is_weighted: whether the batch's weights multiply the rows.
        resources: its tables, or shards of them, and process groups.
        source: where the user's code creates it, if known.
        sharding: how it is sharded; None if it is not.
    """
    store, groups = resources.store, resources.groups
    names = {table.name: table.name for table in tables}
    if sharding is not None:
        names = {shard.table.name: shard.name for shard in sharding.local()}
    facts, settings = {}, dict[object, int]()
    kernel_groups: dict[str, int] = {}
    for table in tables:
        name = names.get(table.name)
        if name is None:  # it is on other ranks
            facts[table.name] = TableFacts(table.num_embeddings, table.embedding_dim, table.dtype, store.device.type)
            continue
        found = store.facts(name)
        if sharding is not None:  # of one of its shards
            found = replace(found, rows=table.num_embeddings, embedding_dim=table.embedding_dim)
        facts[table.name] = found
        optimizer = store.optimizers.get(name)
        same = store.weight(name).device, None if optimizer is None else optimizer.settings()
        kernel_groups[table.name] = settings.setdefault(same, len(settings))
    return CollectionContext(
        collection, tables, facts, kernel_groups, is_weighted, sharding, groups is None or groups.ids_on_host, source
    )
