"""insert_hash: raw ids become rows before any lookup sees them.

Every table that is to be hashed goes through one ``hash_ids`` node. An id without a row contributes nothing to its bag
but still counts in its length, so a MEAN over rows alone would be wrong: the lookup of a hashed MEAN table runs as SUM
and ``mean_divide`` finishes it with the lengths from before hashing.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from recfx.diagnostics import Diagnostic
from recfx.ir.columns import columns_of
from recfx.ir.typed_access import meta_of, node_module
from recfx.nodes import HashIds, Lookup, MeanDivide, SelectFeatures
from recfx.passes._nodes import add_node, nodes_of_kind, replace_inputs, resources_of
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class InsertHash:
    """Insert ``hash_ids`` after every ``select_features``, and ``mean_divide`` where a MEAN now runs as SUM."""

    name: str = "insert_hash"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place; declines static tables."""
        declined: list[Diagnostic] = []
        modified = False
        for select in nodes_of_kind(graph_module, "select_features"):
            module = node_module(graph_module, select, SelectFeatures)
            for table in module.tables:
                if table.hashing is None:
                    message = f"table {table.name!r} is static: hashing=None."
                    declined.append(
                        Diagnostic("static_table", module.collection, message, by=self.name, node=select.name)
                    )
            if any(table.hashing is not None for table in module.tables):
                self._insert(graph_module, select, module)
                modified = True
        return PassResult(graph_module, modified, tuple(declined))

    def _insert(self, graph_module: fx.GraphModule, select: fx.Node, module: SelectFeatures) -> None:
        meta = meta_of(select)
        hashed = tuple(table.name for table in module.tables if table.hashing is not None)
        lookups = list(select.users)
        store = resources_of(graph_module, meta.collection).store
        with graph_module.graph.inserting_after(select):
            hash_module = HashIds(module.collection, module.tables, hashed, store)
            hash_ids = add_node(graph_module, "hash_ids", hash_module, (select,), meta, module.tables, self.name)
        divided_lookups: dict[fx.Node, fx.Node] = {}
        for lookup in lookups:
            lookup.replace_input_with(select, hash_ids)
            lookup_module = node_module(graph_module, lookup, Lookup)
            (table,) = lookup_module.tables
            if table.pooling == "MEAN" and table.hashing is not None:
                lookup_module.pooling = "SUM"
                with graph_module.graph.inserting_after(lookup):
                    columns = columns_of(lookup_module.tables)
                    divide = MeanDivide(lookup_module.tables, (table.name,), lookup_module.features, columns)
                    divided = add_node(graph_module, "mean_divide", divide, (lookup, select), meta, (table,), self.name)
                divided_lookups[lookup] = divided
        replace_inputs(divided_lookups, but=set(divided_lookups.values()))
