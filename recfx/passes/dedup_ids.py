"""dedup_ids: each different id of a key is sent once, and its row comes back once.

``dedup_ids`` leaves ids out before they are routed and sent, and ``expand_rows`` gives every id its row after the rows
have come back. In between, ranks have fewer ids to hash and fewer rows to read and to step. The output takes lengths
and ids from the batch as it was selected.

Tables are declined whose rows are pooled, whose indexes count every sight of an id, and those of which it is not known,
or not expected, that it pays.
"""

from torch import fx

from recfx.errors import Diagnostic
from recfx.ir.node_kinds import ASSEMBLERS
from recfx.ir.operator_graph import OperatorGraph
from recfx.passes.base import PassResult


def dedup_ids(graph: OperatorGraph) -> PassResult:
    """Insert ``dedup_ids`` and ``expand_rows`` in every collection that sends ids of a table that gains by it."""
    declined: list[Diagnostic] = []
    for output in graph.of_kind(*ASSEMBLERS):
        collection = graph.collection(output)
        started = [node for node in graph.of_kind("input_dist_start") if graph.collection(node).name == collection.name]
        if not started:
            continue
        for table in collection.tables:
            reason = table.why_sent_as_they_come
            if reason is not None and (table.dedup.asked or not table.is_pooled):
                declined.append(Diagnostic(reason.code, collection.name, reason.message, node=started[0].name))
        deduped = tuple(table.name for table in collection.tables if table.sends_different)
        if deduped:
            _insert(graph, output, started[0], deduped)
    return PassResult(graph, tuple(declined))


def _insert(graph: OperatorGraph, output: fx.Node, started: fx.Node, deduped: tuple[str, ...]) -> None:
    collection = graph.collection(output).name
    (source,) = started.all_input_nodes
    sender = source if graph.kind(source) == "bucketize" else started
    (ids,) = sender.all_input_nodes
    with graph.graph.inserting_before(sender):
        dedup = graph.add("dedup_ids", (ids,), collection, deduped=deduped)
        different, inverse = graph.item(dedup, 0, "different_ids"), graph.item(dedup, 1, "inverse")
    sender.replace_input_with(ids, different)
    expanded: dict[fx.Node, fx.Node] = {}
    with graph.graph.inserting_before(output):
        for arrived in output.all_input_nodes[:-1]:
            if {table.name for table in graph.tables(arrived)} & set(deduped):
                expanded[arrived] = graph.add("expand_rows", (arrived, inverse), collection)
    graph.replace_all(expanded)
