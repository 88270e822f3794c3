"""insert_hash: makes raw ids rows before any lookup reads them.

All tables that have hashing go through one ``hash_ids`` before the lookups. An id without a row adds nothing to its bag
but still counts in the bag's length, so a MEAN over rows alone would be wrong. Therefore the lookup of a hashed MEAN
runs as SUM, and ``mean_divide`` divides by the lengths from before hashing. Lookups of shards already pool sums.
"""

from __future__ import annotations

from torch import fx

from recfx.diagnostics import Diagnostic
from recfx.ir.operator_graph import OperatorGraph
from recfx.rewrites.base import Rewritten


def insert_hash(graph: OperatorGraph) -> Rewritten:
    """Insert ``hash_ids`` before the lookups; declines static tables."""
    readers: dict[fx.Node, list[fx.Node]] = {}  # by the ids that they read
    for lookup in graph.of_kind("lookup"):
        readers.setdefault(lookup.all_input_nodes[0], []).append(lookup)
    for ids, lookups in readers.items():
        _insert(graph, ids, lookups)
    return Rewritten(
        graph,
        tuple(
            Diagnostic(
                "static_table",
                graph.collection(select).name,
                f"table {table.name!r} is static: hashing=None.",
                by="insert_hash",
                node=select.name,
            )
            for select in graph.of_kind("select_features")
            for table in graph.tables(select)
            if table.hashing is None
        ),
    )


def _insert(graph: OperatorGraph, ids: fx.Node, lookups: list[fx.Node]) -> None:
    collection = graph.collection(lookups[0]).name
    table_of = {lookup: graph.tables(lookup)[0] for lookup in lookups}
    hashed = tuple(table.name for table in table_of.values() if table.hashing is not None)
    if not hashed:
        return
    with graph.graph.inserting_before(lookups[0]):
        hash_ids = graph.add("hash_ids", (ids,), collection, hashed=hashed)
        rows: tuple[fx.Node, ...] = (hash_ids,)
        if any(table.evicts for table in table_of.values()):  # then batches in flight hold rows
            rows = graph.item(hash_ids, 0, "rows"), graph.item(hash_ids, 1, "batch_in_flight")
    divided: dict[fx.Node, fx.Node] = {}
    for lookup, table in table_of.items():
        lookup.args = rows
        if table.pooling == "MEAN" and table.hashing is not None:
            graph.change(lookup, pooling="SUM")
            with graph.graph.inserting_after(lookup):
                divided[lookup] = graph.add("mean_divide", (lookup, ids), collection, divided=(table.name,))
    graph.replace_all(divided)
