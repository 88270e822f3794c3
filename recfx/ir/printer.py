"""The stable text of a graph, and back: the same graph always prints the same, so that tests can compare texts.

One node per line, with its attributes in braces. Facts that follow from the context and change what runs (the dtype and
the optimizer of a lookup, the operation of a way back) are printed along, and checked when the text is read:
``parse_graph(format_graph(graph), graph.context) == graph``.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import fx
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.errors import InputError, printable
from recfx.ir.context import Context
from recfx.ir.meta import NodeMeta, find_module, node_meta
from recfx.ir.names import PLAIN, WORDS, node_name, quoted
from recfx.ir.node_kinds import NODE_KINDS
from recfx.ir.operator_graph import OperatorGraph, lowered_from, names_in
from recfx.ir.operators import kind_of, operator_of
from recfx.ir.verifier import GraphVerificationError, check_attributes, verify_graph
from recfx.ir.ways_back import Precision, Wire

_NODE = re.compile(r"(?P<name>\w+) = (?P<kind>\w+)\((?P<inputs>[\w, ]*)\)(?: \{(?P<attributes>.*)\})?")
_ITEM = re.compile(r"(?P<name>\w+) = (?P<node>\w+)\[(?P<number>\d+)\]")
_TOKEN = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[\[\],=]|[^\s\[\],=]+|\s+")
_DERIVED = ("is_weighted", "dtype", "optimizer", "operation", "wire", "wire_backward", "two_steps")


def format_graph(graph: fx.GraphModule | OperatorGraph, *, with_meta: bool = False) -> str:
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
        with_meta: for a graph that runs, add tables, symbolic shape, bytes and the pass that made each node.
    """
    lines = []
    for node in graph.graph.nodes:
        if isinstance(graph, OperatorGraph):
            lines.append(format_call(node) + attributes_text(graph, node))
        else:
            lines.append(format_node(graph, node) + (format_meta(node_meta(node)) if with_meta else ""))
    return "\n".join(lines)


def format_meta(meta: NodeMeta | None) -> str:
    """What a line says of the node's metadata, as a comment."""
    if meta is None:
        return ""
    shape = ", ".join(str(size) for size in meta.shape)
    return printable(f"  # tables={','.join(meta.tables)} shape=[{shape}] bytes={meta.bytes} by={meta.made_by}")


def format_node(graph_module: fx.GraphModule, node: fx.Node) -> str:
    """The line of one node of a graph that runs, without its metadata.

    It has the attributes of the operator that the node was made from, and then what its module does differently by
    now: see ``Lookup.now``.
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
    several = len(graph.context.collections) > 1
    facts = {name: value for name, value in _facts(graph, node).items() if value}
    attributes = {name: node.kwargs[name] for name in kind.attributes if name in node.kwargs}
    last = {name: part.pop(name) for part in (attributes, facts) for name in ("kernel", "two_steps") if name in part}
    return ({"collection": node.kwargs["collection"]} if several else {}) | attributes | facts | last


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
        return quoted(value)
    return repr(value)


# Reading


def parse_graph(text: str, context: Context) -> OperatorGraph:
    """The graph whose text this is.

    Raises:
        InputError: ``not_a_graph``: a line cannot be read, a fact contradicts the context, or the graph is malformed.
    """
    graph = OperatorGraph(fx.Graph(), context)
    by_name: dict[str, fx.Node] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            _read(graph, line, by_name)
        except (KeyError, ValueError, SyntaxError) as error:
            raise _no_graph(f"line {number} is no node of it ({error}): {line!r}") from error
    if not any(node.op == "output" for node in graph.graph.nodes):
        raise _no_graph("it returns nothing")
    try:
        verify_graph(graph, after="reading")
    except GraphVerificationError as error:
        raise _no_graph(str(error)) from error
    return graph


def _no_graph(why: str) -> InputError:
    return InputError(
        f"the text is not that of a graph: {why}.",
        reason="not_a_graph",
        what_to_do="print the graph again; one node per line.",
    )


def _fail(node: fx.Node, rule: str) -> NoReturn:
    raise ValueError(rule)


def _read(graph: OperatorGraph, line: str, by_name: dict[str, fx.Node]) -> None:
    nodes = graph.graph
    if line.startswith("return "):
        nodes.output(by_name[line.removeprefix("return ")])
        return
    if line.endswith(" = input"):
        name = line.removesuffix(" = input")
        _know(by_name, name, nodes.create_node("placeholder", name, type_expr=KeyedJaggedTensor, name=name))
        return
    item = _ITEM.fullmatch(line)
    if item is not None:
        name, arguments = item["name"], (by_name[item["node"]], int(item["number"]))
        _know(by_name, name, nodes.create_node("call_function", operator.getitem, arguments, {}, name=name))
        return
    match = _NODE.fullmatch(line)
    if match is None:
        raise ValueError("it has another form")
    kind, printed = NODE_KINDS[match["kind"]], _attributes(match["attributes"] or "")
    collection = printed.pop("collection", None) or _collection(graph.context, match["name"], kind.name)
    facts = {name: printed.pop(name) for name in _DERIVED if name in printed and name not in kind.attributes}
    inputs = tuple(by_name[name] for name in match["inputs"].split(", ") if name)
    attributes = {"collection": collection, **printed}
    node = nodes.create_node("call_function", operator_of(kind.name), inputs, attributes, name=match["name"])
    _know(by_name, match["name"], node)
    check_attributes(graph, node, kind, _fail)
    by_context = {name: value for name, value in _facts(graph, node).items() if value}
    for name in dict.fromkeys([*facts, *by_context]):
        value = by_context.get(name, "")
        if facts.get(name, "") != value:
            raise ValueError(f"its {name} is {value or 'not set'} by the context")


def _know(by_name: dict[str, fx.Node], name: str, node: fx.Node) -> None:
    if node.name != name:  # torch.fx has changed it
        raise ValueError(f"no node, or another one, can be called {name!r}")
    by_name[name] = node


def _collection(context: Context, name: str, kind: str) -> str:
    for collection in context.collections:
        if re.fullmatch(rf"{re.escape(node_name(collection, kind))}(_\d+)?", name):
            return collection
    raise ValueError("the context has no such collection")


def _attributes(text: str) -> dict[str, Any]:
    """``tables=[a, b], combine=SUM, is_weighted`` as a dict."""
    tokens = [token for token in _TOKEN.findall(text) if not token.isspace()]
    attributes: dict[str, Any] = {}
    position = 0
    while position < len(tokens):
        name, position = tokens[position], position + 1
        attributes[name] = True
        if tokens[position : position + 1] == ["="]:
            attributes[name], position = _parse_value(tokens, position + 1)
        if tokens[position : position + 1] not in ([], [","]):
            raise ValueError(f"{tokens[position]!r} is not expected")
        position += 1
    return attributes


def _parse_value(tokens: list[str], position: int) -> tuple[Any, int]:
    if position >= len(tokens):
        raise ValueError("a value is missing")
    token = tokens[position]
    if token != "[":
        return _single(token), position + 1
    values: list[Any] = []
    position += 1
    while position < len(tokens) and tokens[position] != "]":
        if tokens[position] != ",":
            values.append(_single(tokens[position]))
        position += 1
    if position == len(tokens):
        raise ValueError("a list does not end")
    return tuple(values), position + 1


def _single(token: str) -> Any:
    if token in WORDS:
        return WORDS[token]
    return token if PLAIN.fullmatch(token) else ast.literal_eval(token)
