"""The calls of collections in a graph of a whole model, where their nodes are inlined or each call is one node."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from recfx.discovery.shallow_tracer import source_of
from recfx.ir.meta import SourceLocation, find_module, node_meta
from recfx.ir.node_kinds import NODE_KINDS


@dataclass(eq=False)
class Call:
    """One call of a collection.

    Args:
        name: unique in the graph.
        path: fully qualified name of the collection.
        nodes: its nodes in the graph.
        inputs: the nodes outside it whose values it takes.
        source: the line of the user's code that makes the call.
        collection: the position of the collection.
    """

    name: str
    path: str
    nodes: list[fx.Node]
    inputs: list[fx.Node]
    source: SourceLocation | None
    collection: int


def find_calls(graph_module: fx.GraphModule, places: Mapping[int, int]) -> list[Call]:
    """The calls, in the order of the graph.

    Args:
        graph_module: the graph of a model.
        places: the position of each collection, by the ``id`` of its module.
    """
    calls = []
    for nodes in _inlined(graph_module):
        (first, meta), *_ = [(node, meta) for node in nodes if (meta := node_meta(node)) is not None]
        prefix = str(first.target).rpartition(".graph_module.")[0]
        own = set(nodes)
        inputs = [source for node in nodes for source in node.all_input_nodes if source not in own]
        name = first.name.removesuffix(f"_{meta.kind}") if first.name.endswith(meta.kind) else first.name
        position = places.get(id(_submodule(graph_module, prefix)), -1)
        calls.append(Call(name, meta.collection, nodes, list(dict.fromkeys(inputs)), meta.source, position))
    for node in graph_module.graph.nodes:
        position = places.get(id(find_module(graph_module, node)), -1)
        if position >= 0:
            calls.append(Call(node.name, str(node.target), [node], node.all_input_nodes, source_of(node), position))
    return [call for call in calls if call.collection >= 0]


def _submodule(graph_module: fx.GraphModule, path: str) -> object:
    try:
        return graph_module.get_submodule(path)
    except AttributeError:
        return None


def _inlined(graph_module: fx.GraphModule) -> list[list[fx.Node]]:
    """The nodes of each inlined call: those of one collection that values travel between without leaving it."""
    leaders: dict[fx.Node, fx.Node] = {}

    def leader(node: fx.Node) -> fx.Node:
        while leaders[node] is not node:
            leaders[node] = node = leaders[leaders[node]]
        return node

    for node in graph_module.graph.nodes:
        if _collection(node) is None:
            continue
        leaders[node] = node
        for source in node.all_input_nodes:
            if source in leaders and _collection(source) == _collection(node):
                leaders[leader(source)] = leader(node)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in leaders:
        groups.setdefault(leader(node), []).append(node)
    return list(groups.values())


def _collection(node: fx.Node) -> str | None:
    """The collection that a node belongs to, which may be an item of what one of its nodes returns."""
    meta = node_meta(node)
    if meta is None and node.target is operator.getitem:
        meta = node_meta(node.all_input_nodes[0])
        if meta is not None and len(NODE_KINDS[meta.kind].outputs) == 1:
            return None  # the user's code takes a feature out of the output
    return None if meta is None else meta.collection
