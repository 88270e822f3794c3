"""Graph verifier: run after every pass; names the pass and the node when something is wrong."""

from __future__ import annotations

import operator

from torch import fx, nn

from recfx.ir.meta import node_meta
from recfx.ir.vocabulary import VOCABULARY

# What may feed what. A node kind that is absent here takes anything.
_FED_BY: dict[str, set[str]] = {
    "bucketize": {"select_features"},
    "input_dist_start": {"select_features", "bucketize"},
    "input_dist_wait": {"input_dist_start", "dist_context"},
    "hash_ids": {"select_features", "input_dist_wait"},
    "lookup": {"select_features", "input_dist_wait", "hash_ids"},
    "output_dist_start": {"lookup", "output_dist_wait", "dist_context"},
    "output_dist_wait": {"output_dist_start"},
    "mean_divide": {"lookup", "output_dist_wait", "select_features", "input_dist_wait"},
    "keyed_tensor": {"lookup", "output_dist_wait", "mean_divide"},
}


class GraphVerificationError(AssertionError):
    """A pass left a graph that is not well formed. Always a bug of recfx, never of the user's model."""


def verify_graph(graph_module: fx.GraphModule, after: str) -> None:
    """Check that ``graph_module`` is well formed.

    Args:
        graph_module: the graph that a pass has just left.
        after: name of that pass.

    Raises:
        GraphVerificationError: names the pass, the node and the rule that it breaks.
    """

    def fail(node: fx.Node, rule: str) -> None:
        raise GraphVerificationError(f"after pass {after}: node {node.name}: {rule}")

    try:
        graph_module.graph.lint()
    except Exception as error:
        raise GraphVerificationError(f"after pass {after}: {error}") from error

    for node in graph_module.graph.nodes:
        if node.op == "call_module":
            _check_module_exists(graph_module, node, fail)
        meta = node_meta(node)
        if meta is None:
            continue
        if meta.kind not in VOCABULARY:
            fail(node, f"{meta.kind!r} is not in the vocabulary")
        if not node.users:
            fail(node, f"nothing uses this {meta.kind}")
        for source in node.all_input_nodes:
            source_kind = _kind(source)
            if source_kind and source_kind not in _FED_BY.get(meta.kind, {source_kind}):
                fail(node, f"a {meta.kind} cannot be fed by {source.name}, a {source_kind}")
    _check_tables(graph_module, after)


def _kind(value: fx.Node) -> str:
    """What a value is: the kind of the node that gives it, or ``dist_context`` for the second of two."""
    if value.target is operator.getitem:
        return "dist_context" if value.args[1] == 1 else _kind(value.all_input_nodes[0])
    meta = node_meta(value)
    return "" if meta is None else meta.kind


def _check_module_exists(graph_module: fx.GraphModule, node: fx.Node, fail: object) -> None:
    try:
        module = graph_module.get_submodule(str(node.target))
    except AttributeError:
        module = None
    if not isinstance(module, nn.Module):
        fail(node, f"no module at {node.target!r}")  # type: ignore[operator]


def _check_tables(graph_module: fx.GraphModule, after: str) -> None:
    """Every table is looked up exactly once per collection, and hashed at most once."""
    seen: dict[tuple[str, str, str], str] = {}
    for node in graph_module.graph.nodes:
        meta = node_meta(node)
        if meta is None or meta.kind not in ("lookup", "hash_ids"):
            continue
        call = str(node.all_input_nodes[0].name) if meta.kind == "hash_ids" else _call_of(node)
        for table in meta.tables:
            key = (meta.kind, f"{meta.collection}/{call}", table)
            if key in seen:
                raise GraphVerificationError(
                    f"after pass {after}: node {node.name}: table {table!r} already has a {meta.kind}, {seen[key]}"
                )
            seen[key] = node.name


def _call_of(lookup: fx.Node) -> str:
    """The keyed_tensor that a lookup ends in: a shared collection may be called several times in one graph."""
    users = list(lookup.users)
    while users:
        meta = node_meta(users[0])
        if meta is None or meta.kind == "keyed_tensor":
            return str(users[0].name)
        users = list(users[0].users)
    return ""
