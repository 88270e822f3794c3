"""find_on_device: rows are found where the tables are, instead of on the host.

``to_host``, ``hash_ids`` and ``to_device`` become ``find_rows``, which reads copies of the indexes. It is not one of
``recfx.passes()``: it makes the graph that a collection runs in eval mode from another one, which it trains with if a
table counts every id. The new node runs the nodes that it replaces where it cannot serve.
"""

from torch import fx

from recfx.errors import Diagnostic
from recfx.ir.operator_graph import OperatorGraph, names_in
from recfx.passes.base import PassResult


def find_on_device(graph: OperatorGraph) -> PassResult:
    """Replace every ``hash_ids`` for whose device a target finds rows; declines, with a reason, where none does.

    Where tables are on the host as well, there is nothing to do, unless their lookups are served by a target that also
    finds rows (in Triton's interpreter).
    """
    declined: list[Diagnostic] = []
    for node in graph.of_kind("hash_ids"):
        collection, rows = graph.collection(node), graph.first_value(node)
        copy = next((user for user in rows.users if graph.kind(user) == "to_device"), None)
        lookups = [user for user in (copy or rows).users if graph.kind(user) == "lookup"]
        if collection.device == "meta":
            continue
        finder = graph.context.targets.find_rows(collection.device)
        kernels = {str(lookup.kwargs.get("kernel", "")) for lookup in lookups}
        if not collection.copies_ids and kernels != {finder.backend}:
            continue
        code, message = "", ""
        if len(graph.hashing(collection.name)) > 1:
            code, message = "several_hash_ids", "several nodes hash ids, and copies of indexes are read by one."
        elif not lookups:
            code, message = "operator_in_between", "an operator between them reads the rows first."
        elif finder.backend == "reference":
            why = " ".join(refusal.message for refusal in finder.declined if refusal.by != "cpu")
            code = "found_on_host"
            message = f"no target finds rows on {collection.device}: {why or 'none has a kernel for it.'}"
        if code:
            declined.append(Diagnostic(code, collection.name, message, node=node.name))
            continue
        in_turn = [table.name for table in collection.local if table.evicts or table.admits]
        if in_turn:
            message = f"in training, ids are hashed on the host, because tables {in_turn} count every id or evict."
            declined.append(Diagnostic("hashed_in_turn", collection.name, message, node=node.name))
        _replace(graph, node, copy, finder.backend)
    return PassResult(graph, tuple(declined))


def _replace(graph: OperatorGraph, node: fx.Node, copy: fx.Node | None, operators: str) -> None:
    ids = node.all_input_nodes[0]
    if graph.kind(ids) == "to_host":
        (ids,) = ids.all_input_nodes
    hashed, collection = names_in(node, "hashed"), graph.collection(node).name
    with graph.graph.inserting_before(node):
        find = graph.add("find_rows", (ids,), collection, hashed=hashed, operators=operators)
    graph.replace(node, find)
    if copy is not None:
        graph.replace(copy, copy.all_input_nodes[0])
    graph.remove_unused()
