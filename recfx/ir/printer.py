"""The stable text of a graph: the same graph always prints the same, so that tests can compare it with golden text."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from recfx.ir.meta import NodeMeta, node_meta
from recfx.ir.node_kinds import NODE_KINDS
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.operator_text import format_operators
from recfx.ir.printable import printable, quoted
from recfx.ir.tables import TableSpec
from recfx.ir.typed_access import find_module


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
    """Those attributes of the node's module that its kind declares as printed and that are set, in braces."""
    meta, module = node_meta(node), find_module(graph_module, node)
    kind = None if meta is None else NODE_KINDS.get(meta.kind)
    if kind is None or module is None:
        return ""
    found: dict[str, Any] = {}
    for path in kind.printed:
        name, value = path.split(".")[-1], _attribute(module, path)
        if value is not None:  # the module of another target may have it elsewhere
            found[name] = value
    shown = [name if value is True else f"{name}={_format_value(value)}" for name, value in found.items() if value]
    return f" {{{', '.join(shown)}}}" if shown else ""


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _format_value(value: object) -> str:
    if isinstance(value, TableSpec):
        return quoted(value.name)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_format_value(each) for each in value)}]"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return quoted(value) if isinstance(value, str) else printable(str(value))


def _format_argument(argument: object) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, (list, tuple)):
        inner = ", ".join(_format_argument(item) for item in argument)
        return f"[{inner}]" if isinstance(argument, list) else f"({inner})"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{key!r}: {_format_argument(value)}" for key, value in argument.items()) + "}"
    return repr(argument)
