"""The stable text of a graph: the same graph always prints the same, so that tests can compare texts."""

import operator
import re
from collections.abc import Mapping
from typing import Any

from torch import fx

from recfx.ir.meta import find_module, node_meta
from recfx.ir.operator_graph import OperatorGraph, lowered_from, names_in
from recfx.ir.operators import kind_of
from recfx.ir.ways_back import Precision, Wire

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.@:/-]*")
"""Names that stand in the text of a graph without quotes."""


def format_graph(graph: fx.GraphModule | OperatorGraph) -> str:
    """Print a graph with one node per line, each with those settings that change what runs, in braces.

    Example:
        >>> from recfx.ir import format_graph
        >>> print(format_graph(recfx.convert(Model()).ebc.graph_module))
        features = input
        ebc_select_features = select_features(features)
        ...
        return ebc_keyed_tensor

    Args:
        graph: any graph, or one that is data.
    """
    if isinstance(graph, OperatorGraph):
        return "\n".join(format_call(node) + attributes_text(graph, node) for node in graph.graph.nodes)
    return "\n".join(format_node(graph, node) for node in graph.graph.nodes)


def format_node(graph_module: fx.GraphModule, node: fx.Node) -> str:
    """The line of one node of a graph that runs: the attributes of the operator that it was made from, and what its
    module does differently by now (``Lookup.now``).
    """
    call, made_from = format_call(node), lowered_from(node)
    if made_from is None:
        return call
    attributes, now = attributes_of(*made_from), getattr(find_module(graph_module, node), "now", {})
    changed = {name: value for name, value in now.items() if value != attributes.get(name, "")}
    return call + _in_braces(attributes) + (f"  # now{_in_braces(changed)}" if changed else "")


def format_call(node: fx.Node) -> str:
    """The line of one node of any graph, without its attributes."""
    if node.op == "placeholder":
        return f"{node.name} = input"
    if node.op == "output":
        return f"return {_format_argument(node.args[0])}"
    if node.op == "get_attr":
        return f"{node.name} = {node.target}"
    arguments = [_format_argument(argument) for argument in node.args]
    if node.target is operator.getitem:
        return f"{node.name} = {arguments[0]}[{arguments[1]}]"
    kind, meta = kind_of(node), node_meta(node)
    if kind is not None:
        called = kind.name  # its keywords are attributes
    else:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        called = meta.kind if meta is not None else f"{node.op}[{target}]"
        arguments += [f"{key}={_format_argument(value)}" for key, value in node.kwargs.items()]
    return f"{node.name} = {called}({', '.join(arguments)})"


def _format_argument(argument: object) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, (list, tuple)):
        inner = ", ".join(_format_argument(item) for item in argument)
        return f"[{inner}]" if isinstance(argument, list) else f"({inner})"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{key!r}: {_format_argument(value)}" for key, value in argument.items()) + "}"
    return repr(argument)


def attributes_text(graph: OperatorGraph, node: fx.Node) -> str:
    """The attributes of a node and the facts that are printed along, in braces; ``""`` if there are none."""
    return _in_braces(attributes_of(graph, node))


def attributes_of(graph: OperatorGraph, node: fx.Node) -> dict[str, Any]:
    """The attributes of a node and the facts that are printed along, in the order of the declaration."""
    kind = kind_of(node)
    if kind is None:
        return {}
    facts = {name: value for name, value in _facts(graph, node).items() if value}
    attributes = {name: node.kwargs[name] for name in kind.attributes if name in node.kwargs}
    last = {name: part.pop(name) for part in (attributes, facts) for name in ("kernel", "two_steps") if name in part}
    return attributes | facts | last


def _facts(graph: OperatorGraph, node: fx.Node) -> dict[str, Any]:
    kind, collection = graph.kind(node), graph.collection(node)
    if kind == "select_features":
        return {"is_weighted": collection.is_weighted}
    if kind == "output_dist_start":
        hop = graph.hop(node)
        wire = hop.wire or Wire()
        sent = {"wire": wire.forward, "wire_backward": wire.backward}
        return {"operation": hop.operation} | {name: str(value) for name, value in sent.items() if value != Precision()}
    if kind in ("lookup", "hash_lookup"):
        (first,) = graph.named(node, names_in(node, "tables")[:1])
        facts = collection.facts_of(first)
        optimizer = "" if facts.optimizer is None else facts.optimizer.rule
        changes = kind == "hash_lookup" and not node.kwargs.get("frozen")
        counts = changes and any(table.evicts or table.admits for table in graph.tables(node))
        dtype = "" if "stored" in node.kwargs else str(facts.dtype).removeprefix("torch.")
        derived = {"is_weighted": collection.is_weighted, "dtype": dtype, "optimizer": optimizer}
        return derived | {"two_steps": "in_training" if counts else ""}
    return {}


def _in_braces(values: Mapping[str, Any]) -> str:
    shown = [name if value is True else f"{name}={_value(value)}" for name, value in values.items()]
    return f" {{{', '.join(shown)}}}" if shown else ""


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else repr(value)
    return repr(value)
