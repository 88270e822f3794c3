"""Snapshots of graphs: what passes leave behind, and which nodes they have touched."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
from torch import fx

from recfx.ir import annotate, format_graph
from recfx.ir.meta import node_meta
from recfx.ir.snapshot import snapshot
from recfx.ir.typed_access import meta_of
from recfx.passes import PassResult, passes, run_passes
from recfx.passes.base import PASSES_KEY, Pass
from tests.passes.small_collection import ADOPTED, INDEXED, collection


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
    graph_module = collection(ADOPTED, ADOPTED).unexpanded_graph()
    run_passes(graph_module, (passes()[0], extra))
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
    graph_module = collection(INDEXED, ADOPTED).unexpanded_graph()
    texts: list[str] = []
    records = run_passes(graph_module, passes(), lambda _, graph: texts.append(format_graph(graph)))
    assert [record.text for record in records] == texts
    assert records[-1].text_with_meta == format_graph(graph_module, with_meta=True)
    assert records[-1].nodes == snapshot(graph_module)
    assert graph_module.meta[PASSES_KEY] == tuple(records)
    assert all(record.seconds >= 0 for record in records)


def test_nodes_that_a_pass_leaves_alone_are_shared() -> None:
    graph_module = collection(INDEXED, ADOPTED).unexpanded_graph()
    first, second = run_passes(graph_module, passes()[:2])
    assert not second.modified
    assert all(one is other for one, other in zip(first.nodes, second.nodes, strict=True))
    duplicate = copy.deepcopy(graph_module)
    assert duplicate.meta[PASSES_KEY][0] is first


def test_a_later_run_goes_on_where_the_earlier_one_has_ended() -> None:
    """As for the graph of eval mode, which is made from that of training."""
    graph_module = collection(INDEXED, INDEXED).unexpanded_graph()
    run_passes(graph_module, passes()[:3])
    later = run_passes(graph_module, passes()[3:])
    assert [record.name for record in graph_module.meta[PASSES_KEY]] == [each.name for each in passes()]
    assert graph_module.meta[PASSES_KEY][3:] == tuple(later)
    whole = collection(INDEXED, INDEXED).graph_module
    assert [meta_of(node).passes for node in graph_module.graph.nodes if node_meta(node) is not None] == [
        meta_of(node).passes for node in whole.graph.nodes if node_meta(node) is not None
    ]
