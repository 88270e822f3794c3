"""split_hash_ids: splits hashing for a pipeline: ``find_ids`` may run early, ``insert_ids`` runs in batch order.

It is not one of ``recfx.passes()``: only ``recfx.TrainPipeline`` runs the graph that this pass makes; everything else
runs the fused graph. The new nodes share the indexes, and the state of their batches, with the nodes that they replace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from recfx.diagnostics import Diagnostic
from recfx.ir.meta import annotate
from recfx.ir.typed_access import meta_of, node_module
from recfx.nodes import FindIds, HashIds, HashLookup, InsertIds, SnapshotIndexes
from recfx.passes._nodes import add_node, nodes_of_kind, remove_node
from recfx.passes.base import PassResult


@dataclass(frozen=True)
class SplitHashIds:
    """Split every ``hash_ids`` and ``hash_lookup``."""

    name: str = "split_hash_ids"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        """Rewrite in place; declines tables that count every id, or evict: their rows cannot be found in advance."""
        declined: list[Diagnostic] = []
        modified = False
        for kind in ("hash_ids", "hash_lookup"):
            for node in nodes_of_kind(graph_module, kind):
                fused = node_module(graph_module, node, HashLookup) if kind == "hash_lookup" else None
                module = node_module(graph_module, node, HashIds) if fused is None else fused.hash_ids
                counted = [table.name for table in module.tables if table.evicts or table.admits]
                if counted:
                    message = f"tables {counted} count every id, or evict: their ids are hashed in batch order."
                    declined.append(
                        Diagnostic("hashed_in_turn", module.collection, message, by=self.name, node=node.name)
                    )
                    continue
                self._split(graph_module, node, module, fused)
                modified = True
        return PassResult(graph_module, modified, tuple(declined))

    def _split(self, graph_module: fx.GraphModule, node: fx.Node, module: HashIds, fused: HashLookup | None) -> None:
        meta, tables = meta_of(node), module.tables
        (ids,) = node.all_input_nodes
        shape = meta_of(ids.all_input_nodes[0] if ids.op == "call_function" else ids).shape  # an item: of the whole
        with graph_module.graph.inserting_before(node):
            snapshot = add_node(graph_module, "snapshot_indexes", SnapshotIndexes(module), (), meta, tables, self.name)
            found = add_node(graph_module, "find_ids", FindIds(module), (ids, snapshot), meta, tables, self.name, shape)
            last = add_node(graph_module, "insert_ids", InsertIds(module), (ids, found), meta, tables, self.name, shape)
            if fused is not None:
                last = add_node(
                    graph_module, "lookup", fused.lookup, (last,), meta, fused.lookup.tables, self.name, meta.shape
                )
                annotate(last, replace(meta_of(last), kernel=meta.kernel))
        node.replace_all_uses_with(last)
        remove_node(graph_module, node)
