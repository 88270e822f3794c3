"""insert_hash: makes raw ids rows before any lookup reads them.

All tables that are to be hashed go through one ``hash_ids`` node before the lookups: after ``select_features`` or, if
the collection is sharded, after the ids of this rank's shards have arrived. An id without a row adds nothing to its bag
but still counts in the bag's length, so a MEAN over rows alone would be wrong. Therefore the lookup of a hashed MEAN
table runs as SUM, and ``mean_divide`` divides by the lengths from before hashing. Lookups of shards already pool sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from recfx.diagnostics import Diagnostic
from recfx.ir.columns import columns_of
from recfx.ir.meta import node_meta
from recfx.ir.typed_access import meta_of, node_module
from recfx.nodes import HashIds, Lookup, MeanDivide, SelectFeatures
from recfx.nodes.table_indexes import TableIndexes
from recfx.passes._nodes import add_node, nodes_of_kind, replace_inputs, resources_of, rows_of
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class InsertHash:
    """Insert ``hash_ids`` before the lookups, and ``mean_divide`` after each MEAN that now runs as SUM."""

    name: str = "insert_hash"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place; declines static tables."""
        declined: list[Diagnostic] = []
        for select in nodes_of_kind(graph_module, "select_features"):
            module = node_module(graph_module, select, SelectFeatures)
            for table in module.tables:
                if table.hashing is None:
                    message = f"table {table.name!r} is static: hashing=None."
                    declined.append(
                        Diagnostic("static_table", module.collection, message, by=self.name, node=select.name)
                    )
        readers: dict[fx.Node, list[fx.Node]] = {}  # keyed by the ids that they read
        for lookup in nodes_of_kind(graph_module, "lookup"):
            readers.setdefault(lookup.all_input_nodes[0], []).append(lookup)
        modified = [self._insert(graph_module, ids, lookups, len(readers) == 1) for ids, lookups in readers.items()]
        return PassResult(graph_module, any(modified), tuple(declined))

    def _insert(self, graph_module: fx.GraphModule, ids: fx.Node, lookups: list[fx.Node], is_alone: bool) -> bool:
        """Hash ``ids`` for these lookups; returns whether any of their tables is to be hashed."""
        modules = {lookup: node_module(graph_module, lookup, Lookup) for lookup in lookups}
        tables = tuple(table for module in modules.values() for table in module.tables)
        hashed = tuple(table.name for table in tables if table.hashing is not None)
        if not hashed:
            return False
        meta = node_meta(ids) or meta_of(ids.all_input_nodes[0])  # or of the node that returns the item
        store, sharded = resources_of(graph_module, meta.collection).store, any(table.shard_of for table in tables)
        indexes = TableIndexes(meta.collection, tables, hashed, store, sharded, is_alone)
        with graph_module.graph.inserting_before(lookups[0]):
            hash_ids = add_node(graph_module, "hash_ids", HashIds(indexes), (ids,), meta, tables, self.name, meta.shape)
            rows = rows_of(graph_module, hash_ids, indexes.evicts)
        divided_lookups: dict[fx.Node, fx.Node] = {}
        for lookup, module in modules.items():
            lookup.args = rows
            (table,) = module.tables
            if table.pooling == "MEAN" and table.hashing is not None:
                module.pooling = "SUM"
                with graph_module.graph.inserting_after(lookup):
                    divide = MeanDivide(module.tables, (table.name,), module.features, columns_of(module.tables))
                    divided = add_node(graph_module, "mean_divide", divide, (lookup, ids), meta, (table,), self.name)
                divided_lookups[lookup] = divided
        replace_inputs(divided_lookups, but=set(divided_lookups.values()))
        return True
