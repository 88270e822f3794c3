"""Snapshots of graphs: what passes leave behind, and which nodes they have touched."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
from torch import fx

from recfx.ir import annotate, format_graph
from recfx.ir.meta import node_meta
from recfx.ir.operator_text import format_operators
from recfx.ir.snapshot import snapshot
from recfx.ir.typed_access import meta_of
from recfx.passes import PassResult, passes, run_passes
from recfx.passes.base import PASSES_KEY, Pass
from recfx.rewrites.base import run_rewrites
from tests.rewrites.small_collection import ADOPTED, INDEXED, collection, lowered, until


@dataclass(frozen=True)
class Nothing:
    """A pass that says that it has changed the graph, but has not."""

    name: str = "nothing"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        return PassResult(graph_module, modified=True)


@dataclass(frozen=True)
class Rename:
    """A pass that gives all lookups other names."""

    name: str = "rename"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        for node in graph_module.graph.nodes:
            meta = node_meta(node)
            if meta is not None and meta.kind == "lookup":
                node.name = f"renamed_{node.name}"
        return PassResult(graph_module, modified=True)


@dataclass(frozen=True)
class Annotate:
    """A pass that changes what is known of one node."""

    name: str = "annotate"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        (node,) = [each for each in graph_module.graph.nodes if each.name == "ebc_lookup_1"]
        annotate(node, replace(meta_of(node), device="elsewhere"))
        return PassResult(graph_module, modified=True)


@dataclass(frozen=True)
class Pooling:
    """A pass that changes the module of one node."""

    name: str = "pooling"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        graph_module.get_submodule("lookup").pooling = "OTHER"  # type: ignore[assignment]
        return PassResult(graph_module, modified=True)


def touched_by(extra: Pass) -> list[str]:
    """The nodes that a pass after ``expand_collection`` touches."""
    graph_module = lowered(collection(ADOPTED, ADOPTED), until("expand_collection"))
    run_passes(graph_module, (extra,))
    return [
        node.name
        for node in graph_module.graph.nodes
        if (meta := node_meta(node)) is not None and meta.passes[-1] == extra.name
    ]


@pytest.mark.parametrize(
    ("extra", "touched"),
    [(Nothing(), []), (Rename(), []), (Annotate(), ["ebc_lookup_1"]), (Pooling(), ["ebc_lookup"])],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_node_is_touched_if_it_is_another_one_afterwards(extra: Pass, touched: list[str]) -> None:
    assert touched_by(extra) == touched


def test_records_hold_the_graph_as_it_was() -> None:
    texts: list[str] = []
    graph = collection(INDEXED, ADOPTED).unexpanded_graph()
    made = run_rewrites(graph, passes(), lambda _, graph: texts.append(format_operators(graph)))
    assert [record.text for record in made.records] == texts
    graph_module = collection(INDEXED, ADOPTED).graph_module
    assert made.records[-1].text_with_meta == format_graph(graph_module, with_meta=True)
    assert [replace(node, op="") for node in made.records[-1].nodes] == [
        replace(node, op="") for node in snapshot(graph_module)
    ]
    assert all(record.seconds >= 0 for record in made.records)


def test_nodes_that_a_pass_leaves_alone_are_shared() -> None:
    graph_module = lowered(collection(INDEXED, ADOPTED), until("insert_dist"))
    first, second = graph_module.meta[PASSES_KEY]
    assert not second.modified
    assert all(one is other for one, other in zip(first.nodes, second.nodes, strict=True))
    duplicate = copy.deepcopy(graph_module)
    assert duplicate.meta[PASSES_KEY][0] is first


def test_a_later_run_goes_on_where_the_earlier_one_has_ended() -> None:
    """As for the graph of eval mode, which is made from that of training."""
    graph_module = lowered(collection(INDEXED, INDEXED), until("insert_hash"))
    later = run_passes(graph_module, (Pooling(),))
    assert [record.name for record in graph_module.meta[PASSES_KEY]] == [
        "expand_collection", "insert_dist", "insert_hash", "pooling",
    ]  # fmt: skip
    assert graph_module.meta[PASSES_KEY][3:] == tuple(later)
    (lookup,) = [node for node in graph_module.graph.nodes if node.name == "ebc_lookup"]
    assert meta_of(lookup).passes == ("expand_collection", "insert_hash", "pooling")
