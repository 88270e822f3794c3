"""lower: gives each node the backend that serves it."""

from dataclasses import replace

from recfx.errors import Diagnostic
from recfx.ir.operator_graph import OperatorGraph
from recfx.passes.base import PassResult


def lower(graph: OperatorGraph) -> PassResult:
    """Choose backends, unless a pass before has; the diagnostics in ``declined`` name those that were passed over."""
    declined: list[Diagnostic] = []
    for node in [*graph.of_kind("lookup"), *graph.of_kind("hash_lookup")]:
        decided = node.kwargs.get("kernel")
        if decided is not None and graph.context.targets.may_name(str(decided)):
            continue
        if decided is not None:
            message = f"a pass decided on kernel {decided!r}, which is one of models; files have kernels of their own."
            declined.append(Diagnostic("kernel_of_models", graph.collection(node).name, message, node=node.name))
        served = graph.served(node)
        declined += [replace(refusal, path=graph.collection(node).name, node=node.name) for refusal in served.declined]
        graph.change(node, kernel=served.backend)
    for node in graph.of_kind("hash_ids", "hash_lookup"):
        graph.change(node, operators=graph.context.targets.index_operators(graph.collection(node).index_device))
    return PassResult(graph, tuple(declined))
