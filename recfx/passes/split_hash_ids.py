"""split_hash_ids: splits hashing for a pipeline: ``find_ids`` may run early, ``insert_ids`` runs in batch order.

It is not one of ``recfx.passes()``: only ``recfx.TrainPipeline`` runs the graph that this pass makes; everything else
runs the graph that it is made from.
"""

from __future__ import annotations

from torch import fx

from recfx.errors import Diagnostic
from recfx.ir.operator_graph import OperatorGraph, attributes_in
from recfx.passes.base import PassResult


def split_hash_ids(graph: OperatorGraph) -> PassResult:
    """Split every ``hash_ids`` and ``hash_lookup``.

    Declines tables that count every id, or evict: their rows cannot be found in advance.
    """
    declined: list[Diagnostic] = []
    for node in graph.of_kind("hash_ids", "hash_lookup"):
        collection = graph.collection(node)
        counted = [table.name for table in collection.local if table.evicts or table.admits]
        if len(graph.hashing(collection.name)) > 1:
            message = "several nodes hash ids, and finding rows ahead is for one that hashes all."
            declined.append(Diagnostic("several_hash_ids", collection.name, message, node=node.name))
        elif counted:
            message = f"tables {counted} count every id, or evict: their ids are hashed in batch order."
            declined.append(Diagnostic("hashed_in_turn", collection.name, message, node=node.name))
        else:
            _split(graph, node)
    return PassResult(graph, tuple(declined))


def _split(graph: OperatorGraph, node: fx.Node) -> None:
    collection, (ids,) = graph.collection(node).name, node.all_input_nodes
    of_lookup = attributes_in(node)
    hashing = {name: of_lookup.pop(name) for name in ("hashed", "operators") if name in of_lookup}
    with graph.graph.inserting_before(node):
        snapshot = graph.add("snapshot_indexes", (), collection)
        found_rows = graph.add("find_ids", (ids, snapshot), collection, **hashing)
        last = graph.add("insert_ids", (ids, found_rows), collection, **hashing)
        if graph.kind(node) == "hash_lookup":
            last = graph.add("lookup", (last,), collection, **of_lookup)
    graph.replace(node, last)
    graph.graph.erase_node(node)
