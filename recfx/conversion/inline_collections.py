"""Inlining: the calls of converted collections in a whole-model graph become the nodes of their graphs."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from recfx.collections.converted_collection import ConvertedCollection
from recfx.discovery.shallow_tracer import source_of
from recfx.ir.meta import SourceLocation, annotate, node_meta
from recfx.runtime.hooks import has_forward_hooks


def inline_collections(graph_module: fx.GraphModule, training: bool) -> None:
    """Replace every call of a converted collection with the nodes of its graph.

    One that has hooks stays one call; so does one that is called with anything but one value of the graph, which is an
    error that it reports itself when the graph runs.

    Args:
        graph_module: the graph of a model.
        training: the mode that it is for.
    """
    for node in list(graph_module.graph.nodes):
        if node.op != "call_module":
            continue
        collection = graph_module.get_submodule(str(node.target))
        if not isinstance(collection, ConvertedCollection):
            continue
        if has_forward_hooks(collection) or not _takes_one_value(node):
            continue
        inline_graph(node, collection.graph_of(training).graph, f"{node.target}.graph_module")
    graph_module.recompile()


def _takes_one_value(call: fx.Node) -> bool:
    given = [*call.args, *call.kwargs.values()]
    return len(given) == 1 and isinstance(given[0], fx.Node)


def inline_graph(call: fx.Node, collection: fx.Graph, prefix: str) -> None:
    """Replace a call of a collection with the nodes of a graph.

    Args:
        call: the node that calls it, with one argument.
        collection: the graph, with one input.
        prefix: the path of the module that holds the modules of these nodes.
    """
    with call.graph.inserting_before(call):
        output = _copy_nodes(call, collection, prefix, source_of(call))
    call.replace_all_uses_with(output)
    call.graph.erase_node(call)


def _copy_nodes(call: fx.Node, collection: fx.Graph, prefix: str, source: SourceLocation | None) -> fx.Node:
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
            mapped[inner] = call.graph.node_copy(inner, mapped.__getitem__)
            if inner.op == "call_module":  # not a getitem on a pair
                mapped[inner].target = f"{prefix}.{inner.target}"
            meta = node_meta(inner)
            if meta is not None and source is not None:  # of this call: a shared collection is called from several
                annotate(mapped[inner], replace(meta, source=source))
    raise AssertionError("the graph of a collection has no output")
