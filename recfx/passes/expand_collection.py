"""expand_collection: one leaf becomes ``select_features``, one ``lookup`` per table, and ``keyed_tensor``.

Source pattern: ``KeyedTensor = EmbeddingBagCollection(KeyedJaggedTensor)``. Nothing is hashed or batched yet: the
result is the standard collection's loop over tables, unrolled.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from recfx.ir.columns import columns_of
from recfx.ir.key_order import KeyOrder
from recfx.ir.tables import embedding_dims, embedding_names
from recfx.ir.typed_access import node_module
from recfx.nodes import AssembleKeyedTensor, Lookup, SelectFeatures
from recfx.nodes.unexpanded import UnexpandedCollection
from recfx.passes._nodes import add_node, keep_resources, nodes_of_kind, remove_node
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class ExpandCollection:
    """Expand every ``collection`` node."""

    name: str = "expand_collection"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place."""
        found = nodes_of_kind(graph_module, "collection")
        for node in found:
            self._expand(graph_module, node)
        return PassResult(graph_module, modified=bool(found))

    def _expand(self, graph_module: fx.GraphModule, node: fx.Node) -> None:
        leaf = node_module(graph_module, node, UnexpandedCollection)
        keep_resources(graph_module, leaf)
        store = leaf.resources.store
        tables, keys = leaf.tables, embedding_names(leaf.tables)
        features = KeyOrder.of(keys)
        with graph_module.graph.inserting_before(node):
            select = add_node(
                graph_module,
                "select_features",
                SelectFeatures(leaf.collection, tables, leaf.is_weighted),
                node.args,  # type: ignore[arg-type]
                leaf,
                tables,
                self.name,
            )
            lookups = []
            for table in tables:
                module = Lookup(leaf.collection, (table,), table.pooling, features, leaf.is_weighted, store)
                lookups.append(add_node(graph_module, "lookup", module, (select,), leaf, (table,), self.name))
            parts = [columns_of((table,)) for table in tables]
            assemble = AssembleKeyedTensor(keys, embedding_dims(tables), parts)
            output = add_node(graph_module, "keyed_tensor", assemble, tuple(lookups), leaf, tables, self.name)
        node.replace_all_uses_with(output)
        remove_node(graph_module, node)
