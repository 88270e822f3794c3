"""lower: gives each node the backend that serves it."""

from __future__ import annotations

from dataclasses import replace

from recfx.diagnostics import Diagnostic
from recfx.ir.operator_graph import OperatorGraph
from recfx.rewrites.base import Rewritten


def lower(graph: OperatorGraph) -> Rewritten:
    """Choose backends; the diagnostics in ``declined`` name the backends that were passed over."""
    declined: list[Diagnostic] = []
    for node in [*graph.of_kind("lookup"), *graph.of_kind("hash_lookup")]:
        served = graph.served(node)
        declined += [replace(each, path=graph.collection(node).name, node=node.name) for each in served.declined]
        graph.change(node, kernel=served.backend)
    for node in graph.of_kind("hash_ids", "hash_lookup"):
        graph.change(node, operators=graph.context.targets.index_operators(graph.collection(node).index_device))
    return Rewritten(graph, tuple(declined))
