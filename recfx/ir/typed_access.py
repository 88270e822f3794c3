"""Typed access to what belongs to a node of recfx's graphs: the module that it calls, and its metadata."""

from __future__ import annotations

from typing import TypeVar

from torch import fx, nn

from recfx.errors import type_of
from recfx.ir.meta import NodeMeta, node_meta
from recfx.ir.verifier import GraphVerificationError

ModuleType = TypeVar("ModuleType", bound=nn.Module)


def node_module(graph_module: fx.GraphModule, node: fx.Node, wanted: type[ModuleType]) -> ModuleType:
    """The module that ``node`` calls.

    Args:
        graph_module: the graph.
        node: a ``call_module`` node of it.
        wanted: the class that the module must have.

    Raises:
        GraphVerificationError: the module has another class. The message names the node and both classes.
    """
    module = find_module(graph_module, node)
    if not isinstance(module, wanted):
        found = "no module" if module is None else type_of(module)
        raise GraphVerificationError(f"node {node.name} calls {found}, not a {wanted.__name__}")
    return module


def find_module(graph_module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The module that ``node`` calls, of any class; None if it does not call one."""
    if node.op != "call_module":
        return None
    try:
        return graph_module.get_submodule(str(node.target))
    except AttributeError:
        return None


def meta_of(node: fx.Node) -> NodeMeta:
    """The metadata of a node that recfx made.

    Raises:
        GraphVerificationError: the node has no metadata. The message names the node.
    """
    meta = node_meta(node)
    if meta is None:
        raise GraphVerificationError(f"node {node.name} has no recfx metadata")
    return meta
