"""insert_hash: makes raw ids rows before any lookup reads them.

All tables that have an index go through one ``hash_ids`` before the lookups; it hands on the ids of the others, whose
range ``select_features`` checks, so that they are rows. An id without a row adds nothing to its bag
but still counts in the bag's length, so a MEAN over rows alone would be wrong. Therefore the lookup of a hashed MEAN
runs as SUM, and ``mean_divide`` divides by the lengths from before hashing. Lookups of shards already pool sums.
"""

from torch import fx

from recfx.errors import Diagnostic
from recfx.ir.operator_graph import OperatorGraph
from recfx.passes.base import PassResult


def insert_hash(graph: OperatorGraph) -> PassResult:
    """Insert ``hash_ids`` before the lookups; declines static tables."""
    readers: dict[fx.Node, list[fx.Node]] = {}  # by the ids that they read
    for lookup in graph.of_kind("lookup"):
        readers.setdefault(lookup.all_input_nodes[0], []).append(lookup)
    for ids, lookups in readers.items():
        _insert(graph, ids, lookups)
    return PassResult(
        graph,
        tuple(
            Diagnostic(
                "static_table",
                graph.collection(select).name,
                f"table {table.name!r} is static: hashing=None.",
                node=select.name,
            )
            for select in graph.of_kind("select_features")
            for table in graph.tables(select)
            if table.hashing is None
        ),
    )


def _insert(graph: OperatorGraph, ids: fx.Node, lookups: list[fx.Node]) -> None:
    collection = graph.collection(lookups[0]).name
    tables = [table for lookup in lookups for table in graph.tables(lookup)]
    hashed = tuple(table.name for table in tables if table.has_index)
    if not hashed:
        return
    with graph.graph.inserting_before(lookups[0]):
        hash_ids = graph.add("hash_ids", (ids,), collection, hashed=hashed)
        rows: tuple[fx.Node, ...] = (hash_ids,)
        if any(table.evicts for table in tables):  # then batches in flight hold rows
            rows = graph.item(hash_ids, 0, "rows"), graph.item(hash_ids, 1, "batch_in_flight")
    divided: dict[fx.Node, fx.Node] = {}
    for lookup in lookups:
        lookup.args = rows
        of_lookup = graph.tables(lookup)
        if lookup.kwargs["combine"] == "MEAN" and any(table.has_index for table in of_lookup):
            graph.change(lookup, combine="SUM")
            names = tuple(table.name for table in of_lookup)
            with graph.graph.inserting_after(lookup):
                divided[lookup] = graph.add("mean_divide", (lookup, ids), collection, divided=names)
    graph.replace_all(divided)
