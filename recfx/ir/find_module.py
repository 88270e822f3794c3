"""The module that a node of a graph calls."""

from __future__ import annotations

from torch import fx, nn


def find_module(graph_module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The module that ``node`` calls, of any class; None if it does not call one."""
    if node.op != "call_module":
        return None
    try:
        return graph_module.get_submodule(str(node.target))
    except AttributeError:
        return None
