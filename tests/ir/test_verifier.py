"""The graph verifier: each rule broken alone, and the message names the pass and the node."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from recfx.ir import GraphVerificationError, verify_graph
from recfx.ir.operator_graph import OperatorGraph
from tests.passes.small_collection import INDEXED, collection, rewritten

Nodes = dict[str, fx.Node]


def feeds(user: str, *sources: str, add: bool = False) -> Callable[[OperatorGraph, Nodes], None]:
    """Give a node these inputs, or add them to those that it has."""

    def edit(graph: OperatorGraph, nodes: Nodes) -> None:
        nodes[user].args = (*(nodes[user].args if add else ()), *(nodes[source] for source in sources))

    return edit


def item_of(source: str, number: int) -> Callable[[OperatorGraph, Nodes], None]:
    def edit(graph: OperatorGraph, nodes: Nodes) -> None:
        with graph.graph.inserting_after(nodes[source]):
            item = graph.item(nodes[source], number, "item")
        nodes["ebc_lookup"].args = (item,)

    return edit


def again(name: str, user: str) -> Callable[[OperatorGraph, Nodes], None]:
    """Let a second node do what one does."""

    def edit(graph: OperatorGraph, nodes: Nodes) -> None:
        with graph.graph.inserting_after(nodes[name]):
            second = graph.graph.node_copy(nodes[name])
        nodes[user].args = (second,) if user == "ebc_lookup_1" else (*nodes[user].args, second)

    return edit


def all_values(graph: OperatorGraph, nodes: Nodes) -> None:
    """Let a lookup take both values of a node."""
    with graph.graph.inserting_after(nodes["ebc_select_features"]):
        started = graph.add("input_dist_start", (nodes["ebc_select_features"],), "")
    nodes["ebc_lookup"].args = (started,)


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (feeds("ebc_keyed_tensor", "ebc_select_features", add=True), "ebc_keyed_tensor: .* cannot be fed by ebc_sel"),
        (
            feeds("ebc_keyed_tensor", "ebc_hash_ids", add=True),
            "ebc_keyed_tensor: .* cannot be fed by ebc_hash_ids",
        ),
        (feeds("ebc_lookup_1", "ebc_lookup", add=True), "ebc_lookup_1: a lookup cannot be fed by ebc_lookup, pooled"),
        (feeds("ebc_lookup", "features"), "ebc_lookup: a lookup cannot be fed by features, .*; input 0 is a KJT"),
        (
            feeds("ebc_mean_divide", "ebc_lookup"),
            "a mean_divide needs a KJT of selected ids as input 1",
        ),
        (feeds("ebc_hash_ids"), "ebc_hash_ids: a hash_ids needs .* as input 0, but has none"),
        (feeds("ebc_keyed_tensor", "ebc_mean_divide"), "ebc_(lookup|mean_divide)_1: nothing uses this"),
        (all_values, "a input_dist_start returns 2 values: use one of its items"),
        (item_of("ebc_select_features", 0), "a select_features has no item 0"),
        (item_of("ebc_hash_ids", 2), "a hash_ids has no item 2"),
        (again("ebc_lookup", "ebc_keyed_tensor"), "table 'users' already has a lookup, ebc_lookup"),
        (again("ebc_hash_ids", "ebc_lookup_1"), "table 'users' already has a hash_ids, ebc_hash_ids"),
        (lambda _, nodes: nodes["ebc_select_features"].prepend(nodes["ebc_lookup"]), "ebc_(lookup|hash_ids)"),
    ],
)
def test_a_rule_that_is_broken(edit: Callable[[OperatorGraph, Nodes], None], rule: str) -> None:
    graph = rewritten(collection(INDEXED, INDEXED), "insert_hash").graph
    verify_graph(graph, after="nothing")
    edit(graph, {node.name: node for node in graph.graph.nodes})
    with pytest.raises(GraphVerificationError, match=f"after pass broken: .*{rule}"):
        verify_graph(graph, after="broken")


def test_a_fused_node_counts_as_both() -> None:
    graph = rewritten(collection(INDEXED, INDEXED), "fuse_hash_lookup").graph
    again("ebc_hash_lookup", "ebc_keyed_tensor")(graph, {node.name: node for node in graph.graph.nodes})
    with pytest.raises(GraphVerificationError, match="table 'users' already has a hash_ids"):
        verify_graph(graph, after="broken")
