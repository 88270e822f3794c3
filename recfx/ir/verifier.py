"""The graph verifier: it runs after every pass, and names the pass and the node if something is wrong."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import fx, nn

from recfx.ir.meta import node_meta
from recfx.ir.node_kinds import NODE_KINDS, NOT_COMBINED, NodeKind, ValueType
from recfx.ir.operators import kind_of


class GraphVerificationError(AssertionError):
    """A pass left a malformed graph. This is a bug in recfx or in a pass of the user's, never in the user's model."""


Fail = Callable[[fx.Node, str], NoReturn]


def verify_graph(graph_module: fx.GraphModule, after: str) -> None:
    """Check that ``graph_module`` is well formed: nodes fit the declarations of their kinds, tables are looked up once.

    Args:
        graph_module: the graph that a pass has just left.
        after: the name of that pass.

    Raises:
        GraphVerificationError: the graph is malformed. The message names the pass, the node and the rule that it
            breaks.
    """
    fail = linted(graph_module.graph, after)
    for node in graph_module.graph.nodes:
        if node.op == "call_module":
            _check_module_exists(graph_module, node, fail)
        meta = node_meta(node)
        if meta is None:
            continue
        kind = NODE_KINDS.get(meta.kind)
        if kind is None:
            fail(node, f"{meta.kind!r} is not a declared node kind")
        if not node.users:
            fail(node, f"nothing uses this {kind.name}")
        check_inputs(node, kind, fail)
    known = [(node, meta) for node in graph_module.graph.nodes if (meta := node_meta(node)) is not None]
    check_once(((node, NODE_KINDS[meta.kind], meta.collection, meta.tables) for node, meta in known), fail)


def linted(graph: fx.Graph, after: str) -> Fail:
    """Let torch.fx check the graph that a pass has left; returns what raises the error if a rule is broken."""

    def fail(node: fx.Node, rule: str) -> NoReturn:
        raise GraphVerificationError(f"after pass {after}: node {node.name}: {rule}")

    try:
        graph.lint()
    except Exception as error:
        raise GraphVerificationError(f"after pass {after}: {error}") from error
    return fail


def check_inputs(node: fx.Node, kind: NodeKind, fail: Fail) -> None:
    """Check that each input has a type that the kind declares at its position, and that none is missing."""
    sources: list[Any] = []
    for argument in node.args:  # attributes are keywords
        sources += argument if isinstance(argument, list) else [argument]  # in exported graphs, parts are a list
    found: list[tuple[fx.Node, ValueType | None]] = [(source, type_of(source, fail)) for source in sources]
    position = 0
    for wanted in kind.inputs:
        begin = position
        while position < len(found) and (wanted.repeats or position == begin):
            if found[position][1] not in (*wanted.types, None):
                break
            position += 1
        if position == begin and not (wanted.repeats or wanted.optional):
            names = " or ".join(each.value for each in wanted.types)
            if position == len(found):
                fail(node, f"a {kind.name} needs {names} as input {position}, but has none")
            _refuse(node, kind, *found[position], fail, f"; input {position} is {names}")
    if position < len(found):
        _refuse(node, kind, *found[position], fail)


def _refuse(
    node: fx.Node, kind: NodeKind, source: fx.Node, given: ValueType | None, fail: Fail, wanted: str = ""
) -> NoReturn:
    what = "a value that recfx does not know" if given is None else given.value
    fail(node, f"a {kind.name} cannot be fed by {source.name}, {what}{wanted}")


def type_of(value: fx.Node, fail: Fail) -> ValueType | None:
    """The type of a value, by the declaration of the kind that produces it; None for values of foreign nodes."""
    if value.op == "placeholder":
        return ValueType.BATCH
    item: Any = None
    giver = value
    if value.target is operator.getitem:
        (giver,), item = value.all_input_nodes, value.args[1]
    kind = _declared(giver)
    if kind is None:
        return None
    if item is None and len(kind.outputs) > 1 and not kind.first_alone:
        fail(value, f"a {kind.name} returns {len(kind.outputs)} values: use one of its items")
    if item is not None and (len(kind.outputs) == 1 or item not in range(len(kind.outputs))):
        fail(value, f"a {kind.name} has no item {item}")
    if giver.kwargs.get("combine") == NOT_COMBINED:
        return ValueType.UNPOOLED
    return type_of(giver.all_input_nodes[0], fail) if kind.like_input else kind.outputs[item or 0]


def _declared(node: fx.Node) -> NodeKind | None:
    """The kind of a node, whether it calls an operator or a module; None for foreign nodes."""
    meta = node_meta(node)
    return kind_of(node) if meta is None else NODE_KINDS.get(meta.kind)


def _check_module_exists(graph_module: fx.GraphModule, node: fx.Node, fail: Fail) -> None:
    try:
        module = graph_module.get_submodule(str(node.target))
    except AttributeError:
        module = None
    if not isinstance(module, nn.Module):
        fail(node, f"no module at {node.target!r}")


def check_once(nodes: Iterable[tuple[fx.Node, NodeKind, str, tuple[str, ...]]], fail: Fail) -> None:
    """Check that every table is looked up once per call of the collection, and hashed once.

    Args:
        nodes: each with its kind, its collection and the names of its tables.
        fail: raises the error.
    """
    seen: dict[tuple[str, str, str], str] = {}
    for node, kind, collection, tables in nodes:
        for done in kind.once:
            call = _call_of(node) if done == "lookup" else str(node.all_input_nodes[0].name)
            for table in tables:
                key = (done, f"{collection}/{call}", table)
                if key in seen:
                    fail(node, f"table {table!r} already has a {done}, {seen[key]}")
                seen[key] = node.name


def _call_of(lookup: fx.Node) -> str:
    """The keyed_tensor that a lookup leads to, which tells several calls of a shared collection apart."""
    users = list(lookup.users)
    while users:
        kind = _declared(users[0])
        if kind is None or kind.name == "keyed_tensor":
            return str(users[0].name)
        users = list(users[0].users)
    return ""
