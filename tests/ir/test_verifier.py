"""The graph verifier: each rule broken alone, and the message names the pass and the node."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from recfx.ir import VOCABULARY, GraphVerificationError, NodeMeta, annotate, verify_graph
from recfx.passes import passes, run_passes
from tests.passes.small_collection import INDEXED, collection

# By the design: ids come from the batch or from another rank, pooled rows from a lookup or from another rank.
MAY_FEED = {
    "bucketize": {"select_features"},
    "input_dist_start": {"select_features", "bucketize"},
    "input_dist_wait": {"input_dist_start"},
    "hash_ids": {"select_features", "input_dist_wait"},
    "lookup": {"select_features", "input_dist_wait", "hash_ids"},
    "output_dist_start": {"lookup", "output_dist_wait"},
    "output_dist_wait": {"output_dist_start"},
    "mean_divide": {"lookup", "output_dist_wait", "select_features", "input_dist_wait"},
    "keyed_tensor": {"lookup", "output_dist_wait", "mean_divide"},
}
PAIRS = [(source, kind) for kind in MAY_FEED for source in VOCABULARY]


def graph_of(*kinds: str) -> fx.GraphModule:
    """A chain of nodes of these kinds, all of table ``t``, named after them."""
    graph = fx.Graph()
    node = graph.placeholder("features")
    for kind in kinds:
        node = graph.create_node("call_function", torch.neg, (node,), {}, name=f"a_{kind}")
        annotate(node, NodeMeta(kind, "a", "test"))
    graph.output(node)
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(("source", "kind"), [(s, k) for s, k in PAIRS if s in MAY_FEED[k]])
def test_what_may_feed_what(source: str, kind: str) -> None:
    verify_graph(graph_of(source, kind), after="test")


@pytest.mark.parametrize(("source", "kind"), [(s, k) for s, k in PAIRS if s not in MAY_FEED[k] and s != k])
def test_what_may_not(source: str, kind: str) -> None:
    rule = f"after pass broken: node a_{kind}: a {kind} cannot be fed by a_{source}, a {source}"
    with pytest.raises(GraphVerificationError, match=rule):
        verify_graph(graph_of(source, kind), after="broken")


def expanded() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    graph_module = collection(INDEXED, INDEXED).unexpanded_graph()
    run_passes(graph_module, passes()[:2])
    verify_graph(graph_module, after="nothing")
    return graph_module, {node.name: node for node in graph_module.graph.nodes}


@pytest.mark.parametrize(
    ("user", "source"),
    [
        ("ebc_keyed_tensor", "ebc_select_features"),
        ("ebc_keyed_tensor", "ebc_hash_ids"),
        ("ebc_lookup_1", "ebc_lookup"),
        ("ebc_mean_divide", "ebc_hash_ids"),
    ],
)
def test_a_further_input_of_the_wrong_kind(user: str, source: str) -> None:
    graph_module, nodes = expanded()
    nodes[user].args = (*nodes[user].args, nodes[source])
    with pytest.raises(GraphVerificationError, match=f"after pass broken: node {user}: .* cannot be fed by {source}"):
        verify_graph(graph_module, after="broken")


def test_a_kind_outside_the_vocabulary() -> None:
    with pytest.raises(
        GraphVerificationError, match="after pass broken: node a_unheard_of: 'unheard_of' is not in the vocabulary"
    ):
        verify_graph(graph_of("unheard_of"), after="broken")


def test_a_node_without_users() -> None:
    graph_module, nodes = expanded()
    nodes["ebc_keyed_tensor"].args = nodes["ebc_keyed_tensor"].args[:1]
    with pytest.raises(GraphVerificationError, match="after pass broken: node ebc_lookup_1: nothing uses this lookup"):
        verify_graph(graph_module, after="broken")


def test_a_use_before_the_definition() -> None:
    graph_module, nodes = expanded()
    nodes["ebc_select_features"].prepend(nodes["ebc_lookup"])
    with pytest.raises(GraphVerificationError, match=r"after pass broken: .*ebc_(lookup|hash_ids)"):
        verify_graph(graph_module, after="broken")


def test_a_module_that_is_not_there() -> None:
    graph_module, nodes = expanded()
    nodes["ebc_lookup"].target = "nowhere"
    with pytest.raises(GraphVerificationError, match=r"after pass broken: .*nowhere"):
        verify_graph(graph_module, after="broken")


@pytest.mark.parametrize("kind", ["lookup", "hash_ids"])
def test_a_table_twice(kind: str) -> None:
    graph_module, nodes = expanded()
    with graph_module.graph.inserting_after(nodes[f"ebc_{kind}"]):
        again = graph_module.graph.node_copy(nodes[f"ebc_{kind}"])
    user = "ebc_keyed_tensor" if kind == "lookup" else "ebc_lookup_1"
    nodes[user].args = (*nodes[user].args, again)
    with pytest.raises(GraphVerificationError, match=f"after pass broken: node {again.name}: .*already has a {kind}"):
        verify_graph(graph_module, after="broken")
