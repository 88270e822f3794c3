"""expand_collection: one leaf becomes ``select_features``, one ``lookup`` per table, and ``keyed_tensor``
(or ``jagged_dict``, which also takes the ids, if rows are not pooled).

Nothing is hashed or batched yet: the result is the standard collection's loop over tables, unrolled.
"""

from torch import fx

from recfx.ir.operator_graph import OperatorGraph
from recfx.passes.base import PassResult


def expand_collection(graph: OperatorGraph) -> PassResult:
    """Expand every ``collection``."""
    for node in graph.of_kind("collection"):
        collection = graph.collection(node)
        (features,) = node.all_input_nodes
        with graph.graph.inserting_before(node):
            select = graph.add("select_features", (features,), collection.name)
            lookups: tuple[fx.Node, ...] = tuple(
                graph.add("lookup", (select,), collection.name, tables=(table.name,), combine=table.pooling)
                for table in collection.tables
            )
            inputs = lookups if collection.is_pooled else (*lookups, select)
            graph.replace(node, graph.add(collection.assembled_by, inputs, collection.name))
        graph.graph.erase_node(node)
    return PassResult(graph)
