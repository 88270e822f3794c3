"""elide_hash: removes hashing for tables whose ids are declared to be their rows.

If all ids of a table are declared to be below ``dense_rows`` (``TableSpec.id_range``), its index would never be read:
``select_features`` checks that range, too. The pass takes such a table out of ``hash_ids``, which goes if it has no
table left, and turns a MEAN that ran as SUM because of hashing back into a MEAN.
"""

from recfx.errors import Diagnostic
from recfx.ir.operator_graph import OperatorGraph, names_in
from recfx.passes.base import PassResult, restore_means


def elide_hash(graph: OperatorGraph) -> PassResult:
    """Take tables that never need their index out of ``hash_ids``; declines the others."""
    declined: list[Diagnostic] = []
    for node in graph.of_kind("hash_ids"):
        hashed = names_in(node, "hashed")
        indexed = [table for table in graph.named(node, hashed) if not table.never_needs_index]
        for name, table in {table.table_name: table for table in indexed}.items():
            message = f"ids of table {name!r} are raw: rows beyond dense_rows need its index."
            if table.id_range is not None:
                message += f" Its ids are declared to be {table.id_range}."
            declined.append(Diagnostic("has_index", graph.collection(node).name, message, node=node.name))
        kept = tuple(table.name for table in indexed)
        if kept == hashed:
            continue
        if kept:
            graph.change(node, hashed=kept)
        else:
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.graph.erase_node(node)
        restore_means(graph)
    return PassResult(graph, tuple(declined))
