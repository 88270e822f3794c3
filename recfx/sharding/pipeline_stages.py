"""Cut a collection's graph into what comes before it sends ids, and what comes before, between and after its waits.

Before ids are sent, a batch can still be refused; where the graph waits, a pipeline may do other things.

The pieces share the graph's modules, and run one after the other; the values that go from one to a later one are named
by the nodes that make them.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from recfx.ir.meta import node_meta
from recfx.ir.node_kinds import CUTS

# Such a node, and all that need it, come after the cut of this number.
_CUT_BEFORE = {kind: number for number, kind in enumerate(CUTS, start=1)}


class Segment:
    """A piece of a graph.

    Args:
        module: runs the nodes.
        inputs: names of the values that it takes, nodes of the whole graph.
        outputs: names of the values that later pieces need.
    """

    def __init__(self, module: fx.GraphModule, inputs: list[str], outputs: list[str]) -> None:
        self.module = module
        self.inputs = inputs
        self.outputs = outputs

    def run(self, values: dict[str, Any]) -> None:
        """Take the inputs out of ``values`` by name, and put the outputs there."""
        results = self.module(*[values[name] for name in self.inputs])
        values.update(zip(self.outputs, results, strict=True))


class CutGraph:
    """A graph and its segments. No module, and no container: copies of modules share it until they make their own."""

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self.segments = cut(graph_module)


def cut(graph_module: fx.GraphModule) -> list[Segment]:
    """Four segments: a rank's own work, ``input_dist_start``, up to the last ``output_dist_start``, the rest."""
    number_of = _number_nodes(graph_module.graph)
    return [_segment(graph_module, number_of, number) for number in range(len(CUTS) + 1)]


def _number_nodes(graph: fx.Graph) -> dict[fx.Node, int]:
    number_of: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        meta = node_meta(node)
        own = 0 if meta is None else _CUT_BEFORE.get(meta.kind, 0)
        number_of[node] = max([own, *(number_of[source] for source in node.all_input_nodes)])
    return number_of


def _segment(graph_module: fx.GraphModule, number_of: dict[fx.Node, int], number: int) -> Segment:
    (result,) = next(node for node in graph_module.graph.nodes if node.op == "output").all_input_nodes
    members = [node for node, own in number_of.items() if own == number and node.op != "placeholder"]
    taken = dict.fromkeys(
        source
        for node in members
        for source in node.all_input_nodes
        if source.op == "placeholder" or number_of[source] != number
    )
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in taken}
    for node in members:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    given = [
        node for node in members if node is result or any(number_of.get(user, number) > number for user in node.users)
    ]
    graph.output(tuple(copies[node] for node in given))
    names = [node.name for node in taken], [node.name for node in given]
    return Segment(fx.GraphModule(graph_module, graph), *names)
