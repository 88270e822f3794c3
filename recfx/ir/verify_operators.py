"""The verifier of graphs of operators: what :mod:`recfx.ir.verifier` checks, and the nodes' attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from recfx.ir.node_kinds import NodeKind
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.operators import kind_of
from recfx.ir.verifier import Fail, check_inputs, check_once, linted

_SINGLE = (bool, int, float, str, torch.dtype)


def verify_operators(graph: OperatorGraph, after: str) -> None:
    """Check that ``graph`` is well formed, with its attributes; arguments and errors are those of ``verify_graph``."""
    fail = linted(graph.graph, after)
    for node in graph.graph.nodes:
        kind = kind_of(node)
        if kind is None:
            continue
        if not node.users:
            fail(node, f"nothing uses this {kind.name}")
        check_attributes(graph, node, kind, fail)
        check_inputs(node, kind, fail)
    check_once(
        (
            (node, kind, str(node.kwargs["collection"]), tuple(table.name for table in graph.tables(node)))
            for node in graph.graph.nodes
            if (kind := kind_of(node)) is not None
        ),
        fail,
    )


def check_attributes(graph: OperatorGraph, node: fx.Node, kind: NodeKind, fail: Fail) -> None:
    """Check that a node's attributes are declared, are plain values, and name what its collection has.

    Args:
        graph: its graph, as far as it exists.
        node: the node, whose inputs exist.
        kind: its kind.
        fail: raises the error.
    """
    given: dict[str, Any] = dict(node.kwargs)
    collection = graph.context.collections.get(given.pop("collection", None))
    if collection is None:
        fail(node, f"the graph is about no collection {node.kwargs.get('collection')!r}")
    for name, value in given.items():
        wanted = kind.attributes.get(name)
        if wanted is None:
            fail(node, f"a {kind.name} has no attribute {name!r}")
        if not isinstance(value, wanted) or not all(
            isinstance(each, _SINGLE) for each in (value if isinstance(value, tuple) else (value,))
        ):
            fail(node, f"its {name} is {value!r}, not a {wanted.__name__} of plain values")
    named = [name for name in ("tables", "hashed", "divided") if name in given]
    known = collection.by_name(graph.works_on_shards(node)) if named else {}
    for name in named:
        missing = [table for table in given[name] if table not in known]
        if missing:
            fail(node, f"its {name} has {missing[0]!r}, which is none of its collection's here")
    if "tables" in kind.attributes and not given.get("tables"):
        fail(node, f"a {kind.name} needs tables")
    if "way" in kind.attributes:
        ways = {} if collection.sharding is None else {way.name: way for way in collection.sharding.ways_back}
        way, hop = given.get("way", ""), given.get("hop", 0)
        if way not in ways:
            fail(node, f"{way!r} is no way back of the collection")
        if not 0 <= hop < ways[way].hop_count:
            fail(node, f"way back {way!r} has no hop {hop}")
