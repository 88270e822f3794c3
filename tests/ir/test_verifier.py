"""The graph verifier: each rule broken alone, and the message names the pass and the node."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from recfx.ir import NODE_KINDS, GraphVerificationError, NodeMeta, annotate, verify_graph
from tests.passes.small_collection import INDEXED, collection, lowered, until

# By the design, input by input; ".1" is the second item of what a node gives. Ids come from the batch or from another
# rank, pooled rows from a lookup or from another rank.
HERE = ("select_features", "input_dist_wait.0")
HASHABLE = (*HERE, "to_host")
OWN = ("select_features", "to_host", "dedup_ids.0")  # not sent yet
POOLED = ("lookup", "hash_lookup", "output_dist_wait")
NOT_POOLED = ("lookup:NONE", "output_dist_wait:NONE")  # where rows are not combined
ROWS = ("hash_ids", "hash_ids.0", "insert_ids", "insert_ids.0")  # a batch in flight comes along where tables evict
# A rank without tables takes part all the same; that all rows arrive at a jagged_dict is another rule.
OPTIONAL = [("output_dist_start", 0), ("lookup", 1), ("jagged_dict", 0)]
TAKES: dict[str, tuple[tuple[str, ...], ...]] = {
    "collection": (("features",),),
    "select_features": (("features",),),
    "dedup_ids": (("select_features", "to_host"),),
    "bucketize": (OWN,),
    "input_dist_start": ((*OWN, "bucketize"),),
    "input_dist_wait": (("input_dist_start.0",), ("input_dist_start.1",)),
    "snapshot_indexes": (),
    "to_host": (HERE,),
    "hash_ids": (HASHABLE,),
    "find_ids": (HASHABLE, ("snapshot_indexes",)),
    "insert_ids": (HASHABLE, ("find_ids",)),
    "to_device": (ROWS,),
    "find_rows": (HERE,),
    "lookup": (
        (*HERE, *ROWS, "to_device", "find_rows", "find_rows.0"),
        ("hash_ids.1", "insert_ids.1", "find_rows.1"),
    ),
    "hash_lookup": (HERE,),
    "output_dist_start": ((*POOLED, "lookup:NONE"), ("input_dist_wait.1",)),
    "output_dist_wait": (("output_dist_start", "output_dist_start:NONE"),),
    "expand_rows": (("output_dist_wait:NONE",), ("dedup_ids.1",)),
    "mean_divide": (POOLED, ("select_features",)),
    "keyed_tensor": ((*POOLED, "mean_divide"),),
    "jagged_dict": ((*NOT_POOLED, "expand_rows"), ("select_features",)),
}
VALUES = [
    "features",
    *(
        name if len(kind.outputs) == 1 else f"{name}.{item}"
        for name, kind in NODE_KINDS.items()
        for item in range(len(kind.outputs))
    ),
    "hash_ids",
    "insert_ids",
    "find_rows",
    *NOT_POOLED,
    "output_dist_start:NONE",
]
INPUTS = [(kind, position) for kind, inputs in TAKES.items() for position in range(len(inputs))]


class Chain:
    """A graph that ends in a node of one kind, made of nodes that are right except where the test says otherwise."""

    def __init__(self, kind: str, sources: list[str]) -> None:
        self.graph = fx.Graph()
        self.values = {"features": self.graph.placeholder("features")}
        self.graph.output(self.node(kind, sources, f"a_{kind}_tested"))

    def node(self, kind: str, sources: list[str], name: str) -> fx.Node:
        kind, _, combine = kind.partition(":")
        arguments = tuple(self.value(source) for source in sources)
        node = self.graph.create_node("call_function", torch.neg, arguments, {}, name=name)
        return annotate(node, NodeMeta(kind, "a", "test", combine=combine))

    def value(self, name: str) -> fx.Node:
        if name not in self.values:
            kind, _, item = name.partition(".")
            if item:
                whole = self.value(kind)
                self.values[name] = self.graph.call_function(operator.getitem, (whole, int(item)))
            else:
                self.values[name] = self.node(kind, right_sources(kind.partition(":")[0]), f"a_{kind}")
        return self.values[name]

    def verify(self) -> None:
        verify_graph(fx.GraphModule({}, self.graph), after="broken")


def right_sources(kind: str) -> list[str]:
    return [feeders[0] for feeders in TAKES[kind]]


def test_every_declared_kind_is_tested_here() -> None:
    assert TAKES.keys() == NODE_KINDS.keys()


@pytest.mark.parametrize(("kind", "position"), INPUTS)
def test_what_may_feed_what(kind: str, position: int) -> None:
    for source in VALUES:
        sources = right_sources(kind)
        sources[position] = source
        chain = Chain(kind, sources)
        if source in TAKES[kind][position]:
            chain.verify()
            continue
        where = f"after pass broken: node a_{kind}_tested: a {kind} "
        with pytest.raises(GraphVerificationError, match=f"{where}.*(cannot be fed by|but has none)"):
            chain.verify()


@pytest.mark.parametrize("kind", sorted(TAKES))
def test_one_input_too_many(kind: str) -> None:
    with pytest.raises(GraphVerificationError, match=f"node a_{kind}_tested: a {kind} cannot be fed by "):
        Chain(kind, [*right_sources(kind), "output_dist_start"]).verify()


@pytest.mark.parametrize(("kind", "position"), [(k, p) for k, p in INPUTS if len(TAKES[k]) > 1])
def test_an_input_that_is_missing(kind: str, position: int) -> None:
    sources = right_sources(kind)
    del sources[position]
    chain = Chain(kind, sources)
    if (kind, position) in OPTIONAL:
        chain.verify()
        return
    with pytest.raises(GraphVerificationError, match=f"after pass broken: node a_{kind}_tested: a {kind} "):
        chain.verify()


@pytest.mark.parametrize(
    ("user", "sources"), [("lookup", ["input_dist_wait"]), ("input_dist_wait", ["input_dist_start", "features"])]
)
def test_several_values_are_not_one(user: str, sources: list[str]) -> None:
    with pytest.raises(GraphVerificationError, match=f"a {sources[0]} returns 2 values: use one of its items"):
        Chain(user, sources).verify()


@pytest.mark.parametrize("source", ["select_features.0", "input_dist_wait.2"])
def test_an_item_that_is_not_there(source: str) -> None:
    with pytest.raises(GraphVerificationError, match=f"a {source[:-2]} has no item {source[-1]}"):
        Chain("lookup", [source]).verify()


def expanded() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    graph_module = lowered(collection(INDEXED, INDEXED), until("insert_hash"))
    verify_graph(graph_module, after="nothing")
    return graph_module, {node.name: node for node in graph_module.graph.nodes}


def assert_refused(graph_module: fx.GraphModule, match: str) -> None:
    with pytest.raises(GraphVerificationError, match=match):
        verify_graph(graph_module, after="broken")


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
    assert_refused(graph_module, f"after pass broken: node {user}: .* cannot be fed by {source}")


def test_a_kind_that_is_not_declared() -> None:
    graph_module, nodes = expanded()
    annotate(nodes["ebc_lookup"], NodeMeta("unheard_of", "ebc", "test"))
    assert_refused(graph_module, "after pass broken: node ebc_lookup: 'unheard_of' is not a declared node kind")


def test_a_node_without_users() -> None:
    graph_module, nodes = expanded()
    nodes["ebc_keyed_tensor"].args = nodes["ebc_keyed_tensor"].args[:1]
    assert_refused(graph_module, "after pass broken: node ebc_lookup_1: nothing uses this lookup")


def test_a_use_before_the_definition() -> None:
    graph_module, nodes = expanded()
    nodes["ebc_select_features"].prepend(nodes["ebc_lookup"])
    assert_refused(graph_module, r"after pass broken: .*ebc_(lookup|hash_ids)")


def test_a_module_that_is_not_there() -> None:
    graph_module, nodes = expanded()
    nodes["ebc_lookup"].target = "nowhere"
    assert_refused(graph_module, r"after pass broken: .*nowhere")


def test_a_fused_node_counts_as_both() -> None:
    graph_module = collection(INDEXED, INDEXED).graph_module
    nodes = {node.name: node for node in graph_module.graph.nodes}
    with graph_module.graph.inserting_after(nodes["ebc_hash_lookup"]):
        again = graph_module.graph.node_copy(nodes["ebc_hash_lookup"])
    output = nodes["ebc_keyed_tensor"]
    output.args = (*output.args, again)
    assert_refused(graph_module, f"node {again.name}: table 'users' already has a hash_ids")


@pytest.mark.parametrize("kind", ["lookup", "hash_ids"])
def test_a_table_twice(kind: str) -> None:
    graph_module, nodes = expanded()
    with graph_module.graph.inserting_after(nodes[f"ebc_{kind}"]):
        again = graph_module.graph.node_copy(nodes[f"ebc_{kind}"])
    user = "ebc_keyed_tensor" if kind == "lookup" else "ebc_lookup_1"
    nodes[user].args = (*nodes[user].args, again) if kind == "lookup" else (again,)
    assert_refused(graph_module, f"after pass broken: node {again.name}: .*already has a {kind}")
