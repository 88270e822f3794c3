"""Inlining: the calls of converted collections in a whole-model graph become the nodes of their graphs."""

from __future__ import annotations

from torch import fx

from recfx.hooks import has_forward_hooks
from recfx.modules.converted_collection import ConvertedCollection


def inline_collections(graph_module: fx.GraphModule, training: bool) -> None:
    """Replace every call of a converted collection with the nodes of its graph; one that has hooks stays one call.

    Args:
        graph_module: the graph of a model.
        training: the mode that it is for.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_module":
            continue
        collection = graph_module.get_submodule(str(node.target))
        if not isinstance(collection, ConvertedCollection):
            continue
        if has_forward_hooks(collection):
            continue
        with graph.inserting_before(node):
            output = _copy_nodes(graph, node, collection.graph_of(training).graph)
        node.replace_all_uses_with(output)
        graph.erase_node(node)
    graph_module.recompile()


def _copy_nodes(graph: fx.Graph, call: fx.Node, collection: fx.Graph) -> fx.Node:
    mapped: dict[fx.Node, fx.Node] = {}
    (features,) = [*call.args, *call.kwargs.values()]
    for inner in collection.nodes:
        if inner.op == "placeholder":
            assert isinstance(features, fx.Node)
            mapped[inner] = features
        elif inner.op == "output":
            output = inner.args[0]
            assert isinstance(output, fx.Node)
            return mapped[output]
        else:
            mapped[inner] = graph.node_copy(inner, mapped.__getitem__)
            if inner.op == "call_module":  # not a getitem on a pair
                mapped[inner].target = f"{call.target}.graph_module.{inner.target}"
    raise AssertionError("the graph of a collection has no output")
