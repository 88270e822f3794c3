"""Makes nodes, with their names, symbolic sizes and metadata, in the same way for every pass."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import sympy
from torch import fx, nn

from recfx.ir.meta import Collective, NodeMeta, annotate, node_meta
from recfx.ir.names import node_name
from recfx.ir.node_kinds import NODE_KINDS
from recfx.ir.tables import TableSpec
from recfx.ir.typed_access import meta_of, node_module
from recfx.nodes.base import NodeModule
from recfx.nodes.resources import Resources
from recfx.nodes.unexpanded import UnexpandedCollection
from recfx.serving import ServedNode

_RESOURCES = "recfx_resources"


def nodes_of_kind(graph_module: fx.GraphModule, kind: str) -> list[fx.Node]:
    """The graph's nodes of one kind, in order."""
    return [node for node in graph_module.graph.nodes if (meta := node_meta(node)) is not None and meta.kind == kind]


def add_node(
    graph_module: fx.GraphModule,
    kind: str,
    module: NodeModule | ServedNode,
    arguments: tuple[fx.Node, ...],
    like: UnexpandedCollection | NodeMeta,
    tables: tuple[TableSpec, ...],
    made_by: str,
    shape: tuple[sympy.Expr, ...] | None = None,
    collectives: tuple[Collective, ...] = (),
) -> fx.Node:
    """Insert a call of ``module`` at the graph's insertion point.

    Args:
        graph_module: the graph of the collection.
        kind: name of a declared node kind; the module is registered under it (with a number if the name is taken).
        module: the module that the node calls.
        arguments: its inputs.
        like: what the collection name and the source location are copied from.
        tables: the tables that the node works on.
        made_by: name of the pass.
        shape: the symbolic shape of the value; None: as declared by the kind.
        collectives: the collective calls of the node.
    """
    numbers = graph_module.meta.setdefault("recfx_numbers", {})
    number = numbers[kind] = numbers.get(kind, -1) + 1
    target = kind if number == 0 else f"{kind}_{number}"
    graph_module.add_submodule(target, module)
    name = node_name(like.collection, target)
    module.label = name
    node = graph_module.graph.create_node("call_module", target, arguments, {}, name=name)
    usual, dtype = NODE_KINDS[kind].size(tables)
    shape = usual if shape is None else shape
    return annotate(
        node,
        NodeMeta(
            kind=kind,
            collection=like.collection,
            made_by=made_by,
            shape=shape,
            dtype=dtype,
            bytes=sympy.Integer(dtype.itemsize) * sympy.prod(shape),
            device=_device(like),
            source=like.source,
            tables=tuple(table.name for table in tables),
            collectives=collectives,
        ),
    )


def add_item(graph_module: fx.GraphModule, pair: fx.Node, number: int, name: str) -> fx.Node:
    """One of the values that a node returns, as a node named ``<collection fqn>_<name>``."""
    name = node_name(meta_of(pair).collection, name)
    return graph_module.graph.create_node("call_function", operator.getitem, (pair, number), {}, name=name)


def rows_of(graph_module: fx.GraphModule, hashed: fx.Node, evicts: bool) -> tuple[fx.Node, ...]:
    """The inputs that lookups take from a node that hashes. If there are several, this inserts nodes for them.

    Args:
        graph_module: the graph; its insertion point is after ``hashed``.
        hashed: the node.
        evicts: whether any of its tables evicts. Then batches in flight hold rows, and lookups report when a batch has
            finished.
    """
    if not evicts:
        return (hashed,)
    return add_item(graph_module, hashed, 0, "rows"), add_item(graph_module, hashed, 1, "batch_in_flight")


def keep_resources(graph_module: fx.GraphModule, leaf: UnexpandedCollection) -> None:
    """Keep the resources of a collection for the passes that run after its expansion.

    They are an attribute of the graph module, so that copies of it do not keep the original's tables alive.
    """
    graph_module.__dict__.setdefault(_RESOURCES, {})[leaf.collection] = leaf.resources


def resources_of(graph_module: fx.GraphModule, collection: str) -> Resources:
    """The resources of a collection, for the modules of nodes that a pass adds.

    Args:
        graph_module: the graph, after ``expand_collection``.
        collection: fully qualified name, as in the nodes' metadata.
    """
    found: Resources = graph_module.__dict__[_RESOURCES][collection]
    return found


def replace_inputs(replacements: Mapping[fx.Node, fx.Node], but: Collection[fx.Node] = ()) -> None:
    """Make every node that takes a key of ``replacements`` as an argument take its value; each is rewritten once.

    torch.fx's ``replace_all_uses_with`` rewrites all inputs of a user to replace one of them. For ``keyed_tensor``,
    which has one input per table, that would be quadratic.

    Args:
        replacements: what to use instead of each node.
        but: users that are left unchanged.
    """
    users = dict.fromkeys(user for node in replacements for user in node.users if user not in but)
    for user in users:
        user.args = fx.map_arg(user.args, lambda node: replacements.get(node, node))


def remove_node(graph_module: fx.GraphModule, node: fx.Node) -> None:
    """Erase a node that nothing uses, and the module that it called, if any."""
    graph_module.graph.erase_node(node)
    if node.op == "call_module":
        graph_module.delete_submodule(str(node.target))


def renumber(graph_module: fx.GraphModule, kinds: tuple[str, ...]) -> None:
    """Renumber the nodes of these kinds from the start, because the names of replaced nodes are free now."""
    for kind in kinds:
        nodes = nodes_of_kind(graph_module, kind)
        modules: list[Any] = [node_module(graph_module, node, nn.Module) for node in nodes]
        for node in nodes:
            graph_module.delete_submodule(str(node.target))
        for number, (node, module) in enumerate(zip(nodes, modules, strict=True)):
            node.target = kind if number == 0 else f"{kind}_{number}"
            graph_module.add_submodule(node.target, module)
            node.name = module.label = node_name(meta_of(node).collection, node.target)
        graph_module.meta["recfx_numbers"][kind] = len(nodes) - 1


def _device(like: UnexpandedCollection | NodeMeta) -> str:
    if isinstance(like, NodeMeta):
        return like.device
    if not like.tables:
        return ""
    return like.resources.store.device.type
