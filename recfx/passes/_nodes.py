"""Makes nodes, with their names, symbolic sizes and metadata, in the same way for every pass."""

from __future__ import annotations

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
from recfx.serving import ServedNode


def nodes_of_kind(graph_module: fx.GraphModule, kind: str) -> list[fx.Node]:
    """The graph's nodes of one kind, in order."""
    return [node for node in graph_module.graph.nodes if (meta := node_meta(node)) is not None and meta.kind == kind]


def add_node(
    graph_module: fx.GraphModule,
    kind: str,
    module: NodeModule | ServedNode,
    arguments: tuple[fx.Node, ...],
    like: NodeMeta,
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
            device=like.device,
            source=like.source,
            tables=tuple(table.name for table in tables),
            collectives=collectives,
        ),
    )


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
