"""fuse_served_lookup: in files, finding ids and pooling their rows become one node, where one operator does both.

It is not one of ``recfx.passes()``: it makes graphs for files that are read with recfx's operators.
"""

from dataclasses import replace

from recfx.ir.operator_graph import OperatorGraph, attributes_in, names_in
from recfx.passes.base import PassResult


def fuse_served_lookup(graph: OperatorGraph) -> PassResult:
    """Replace ``lookup``, and the ``find_rows`` before it, by ``hash_lookup``: all of them, because they share the rows
    that are found, or none; ``declined`` names the lookups that have no such operator.
    """
    declined = tuple(
        replace(refusal, path=graph.collection(node).name, node=node.name)
        for node in graph.of_kind("lookup")
        if (refusal := graph.served(node).finding_declined)
    )
    if declined:
        return PassResult(graph, declined)
    for node in graph.of_kind("lookup"):
        ids = rows = node.all_input_nodes[0]
        hashed: tuple[str, ...] = ()
        if graph.kind(rows) == "find_rows":
            ids, indexed = rows.all_input_nodes[0], names_in(rows, "hashed")
            hashed = tuple(name for name in names_in(node, "tables") if name in indexed)
        with graph.graph.inserting_before(node):
            attributes = attributes_in(node) | {"hashed": hashed, "frozen": bool(hashed)}
            fused = graph.add("hash_lookup", (ids,), graph.collection(node).name, **attributes)
        graph.replace(node, fused)
        graph.graph.erase_node(node)
    for find in graph.of_kind("find_rows"):
        graph.replace(find, find.all_input_nodes[0])  # for ``mean_divide``, to which lengths are the same
    graph.remove_unused()
    return PassResult(graph)
