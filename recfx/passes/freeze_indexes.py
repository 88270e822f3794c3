"""freeze_indexes: ids are found in indexes that no longer change, so nothing is inserted, evicted or in flight.

``hash_ids`` becomes ``find_rows``. A MEAN that ran as SUM because of hashing becomes a MEAN again if all tables of its
lookup are hashed here, because rows of -1 then stay in their bags and count in the length. It is not one of
``recfx.passes()``: it makes graphs for files.
"""

import operator

from torch import fx

from recfx.ir.operator_graph import OperatorGraph, names_in
from recfx.passes.base import PassResult, restore_means


def freeze_indexes(graph: OperatorGraph) -> PassResult:
    """Replace ``hash_ids`` and what follows from it."""
    for node in graph.of_kind("hash_ids"):
        _freeze(graph, node)
    graph.remove_unused()
    restore_means(graph)
    return PassResult(graph)


def _freeze(graph: OperatorGraph, node: fx.Node) -> None:
    with graph.graph.inserting_before(node):
        hashed, collection = names_in(node, "hashed"), graph.collection(node).name
        rows = graph.add("find_rows", tuple(node.all_input_nodes), collection, hashed=hashed, frozen=True)
    graph.replace(graph.first_value(node), rows)
    for in_flight in [user for user in node.users if user.target is operator.getitem and user.args[1] == 1]:
        for lookup in list(in_flight.users):
            lookup.args = tuple(argument for argument in lookup.args if argument is not in_flight)
    graph.replace(node, rows)
