"""elide_hash: removes hashing for tables whose ids are their rows.

A table with ``dense_rows == rows`` has no index: ``select_features`` checks the range of its ids, which are then rows.
The same holds for a table whose ids are all known to be below ``dense_rows``, by what the model does to them or by what
the user has declared (``TableSpec.id_range``): its index would never be read. ``select_features`` checks that, too.
The pass takes such a table out of ``hash_ids`` (and removes the node when it has no table left), and turns a MEAN that
ran as SUM because of hashing back into a MEAN.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from recfx.diagnostics import Diagnostic
from recfx.ir.typed_access import find_module, node_module
from recfx.nodes import HashIds, Lookup, MeanDivide
from recfx.passes._nodes import nodes_of_kind, remove_node, replace_inputs
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class ElideHash:
    """Take tables without an index, or that never need it, out of ``hash_ids``."""

    name: str = "elide_hash"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place; declines tables with an index."""
        declined: list[Diagnostic] = []
        modified = False
        for node in nodes_of_kind(graph_module, "hash_ids"):
            module = node_module(graph_module, node, HashIds)
            indexed = [table for table in module.tables if table.has_index and not table.never_needs_index]
            kept = tuple(table.name for table in indexed)
            for name, table in {table.table_name: table for table in indexed}.items():
                message = f"ids of table {name!r} are raw: rows beyond dense_rows need its index."
                if table.id_range is not None:
                    message += f" Its ids are {table.id_range}: {table.id_range.proof}."
                declined.append(Diagnostic("has_index", module.collection, message, by=self.name, node=node.name))
            if len(kept) == len(module.hashed):
                continue
            modified = True
            self._restore_means(graph_module, kept)
            module.indexes.hashed = kept
            if not kept:
                node.replace_all_uses_with(node.all_input_nodes[0])
                remove_node(graph_module, node)
        return PassResult(graph_module, modified, tuple(declined))

    def _restore_means(self, graph_module: fx.GraphModule, hashed: tuple[str, ...]) -> None:
        still_hashed = set(hashed)
        restored: dict[fx.Node, fx.Node] = {}
        for node in nodes_of_kind(graph_module, "mean_divide"):
            divide, pooled = node_module(graph_module, node, MeanDivide), node.all_input_nodes[0]
            lookup = find_module(graph_module, pooled)
            if not isinstance(lookup, Lookup) or any(table in still_hashed for table in divide.divided):
                continue  # these pooled rows have arrived from several ranks, so they must stay sums
            lookup.pooling = "MEAN"
            restored[node] = pooled
        replace_inputs(restored)
        for node in restored:
            remove_node(graph_module, node)
