"""Inlining: the calls of islands in a whole-model graph become the nodes of their graphs."""

from __future__ import annotations

from torch import fx

from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.sharding.collection import ShardedHashEmbeddingBagCollection


def inline_islands(graph_module: fx.GraphModule) -> None:
    """Replace every call of an island by the nodes of its graph; an island with hooks stays one call."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_module":
            continue
        island = graph_module.get_submodule(str(node.target))
        if not isinstance(island, (HashEmbeddingBagCollection, ShardedHashEmbeddingBagCollection)):
            continue
        if island._forward_hooks or island._forward_pre_hooks:
            continue
        with graph.inserting_before(node):
            output = _copy_nodes(graph, node, island.graph_module.graph)
        node.replace_all_uses_with(output)
        graph.erase_node(node)
    graph_module.recompile()


def _copy_nodes(graph: fx.Graph, call: fx.Node, island: fx.Graph) -> fx.Node:
    mapped: dict[fx.Node, fx.Node] = {}
    (features,) = [*call.args, *call.kwargs.values()]
    for inner in island.nodes:
        if inner.op == "placeholder":
            assert isinstance(features, fx.Node)
            mapped[inner] = features
        elif inner.op == "output":
            output = inner.args[0]
            assert isinstance(output, fx.Node)
            return mapped[output]
        else:
            mapped[inner] = graph.node_copy(inner, mapped.__getitem__)
            if inner.op == "call_module":  # not the items of pairs
                mapped[inner].target = f"{call.target}.graph_module.{inner.target}"
    raise AssertionError("an island's graph has an output")
