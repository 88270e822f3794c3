"""The stable text of a graph: the same graph always prints the same, so that tests can compare it with golden text."""

from __future__ import annotations

import operator

from torch import fx

from recfx.ir.find_module import find_module
from recfx.ir.meta import NodeMeta, node_meta
from recfx.ir.operator_graph import OperatorGraph, lowered_from
from recfx.ir.operator_text import attributes_of, format_operators, format_values
from recfx.ir.printable import printable


def format_graph(graph_module: fx.GraphModule | OperatorGraph, *, with_meta: bool = False) -> str:
    """Print a graph with one node per line, each with those settings of its module that change what runs, in braces.

    Args:
        graph_module: any graph, or one that is data.
        with_meta: for a graph that runs, add tables, symbolic shape, bytes and the pass that made each node.
    """
    if isinstance(graph_module, OperatorGraph):
        return format_operators(graph_module)
    lines = []
    for node in graph_module.graph.nodes:
        line = format_node(graph_module, node)
        lines.append(line + format_meta(node_meta(node)) if with_meta else line)
    return "\n".join(lines)


def format_meta(meta: NodeMeta | None) -> str:
    """What a line says of the node's metadata, as a comment."""
    if meta is None:
        return ""
    shape = ", ".join(str(size) for size in meta.shape)
    return printable(f"  # tables={','.join(meta.tables)} shape=[{shape}] bytes={meta.bytes} by={meta.made_by}")


def format_node(graph_module: fx.GraphModule, node: fx.Node) -> str:
    """The line of one node, without its metadata."""
    return format_call(node) + format_attributes(graph_module, node)


def format_call(node: fx.Node) -> str:
    """The line of one node, without the attributes of its module."""
    if node.op == "placeholder":
        return f"{node.name} = input"
    if node.op == "output":
        return f"return {_format_argument(node.args[0])}"
    arguments = ", ".join(
        [_format_argument(argument) for argument in node.args]
        + [f"{key}={_format_argument(value)}" for key, value in node.kwargs.items()]
    )
    if node.op == "get_attr":
        return f"{node.name} = {node.target}"
    if node.target is operator.getitem:
        return f"{node.name} = {_format_argument(node.args[0])}[{_format_argument(node.args[1])}]"
    meta = node_meta(node)
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    called = meta.kind if meta is not None else f"{node.op}[{target}]"
    return f"{node.name} = {called}({arguments})"


def format_attributes(graph_module: fx.GraphModule, node: fx.Node) -> str:
    """The attributes of the operator that a node was made from, in braces, with the facts that change what runs.

    Behind them stands what its module does otherwise by now: see ``Lookup.now``.
    """
    made_from = lowered_from(node)
    if made_from is None:
        return ""
    said, now = attributes_of(*made_from), getattr(find_module(graph_module, node), "now", {})
    changed = {name: value for name, value in now.items() if value != said.get(name, "")}
    return format_values(said) + (f"  # now{format_values(changed)}" if changed else "")


def _format_argument(argument: object) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, (list, tuple)):
        inner = ", ".join(_format_argument(item) for item in argument)
        return f"[{inner}]" if isinstance(argument, list) else f"({inner})"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{key!r}: {_format_argument(value)}" for key, value in argument.items()) + "}"
    return repr(argument)
