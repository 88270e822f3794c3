"""Snapshots of graphs: what passes leave behind, and which nodes they have touched."""

from collections.abc import Callable

import pytest

from recfx.ir import format_graph
from recfx.ir.meta import node_meta
from recfx.ir.operator_graph import OperatorGraph
from recfx.passes import PassResult, Rewrite, passes
from recfx.passes.base import run_passes
from tests.passes.small_collection import ADOPTED, INDEXED, collection, rewritten


def nothing(graph: OperatorGraph) -> PassResult:
    """A pass that changes nothing."""
    return PassResult(graph)


def pooling(graph: OperatorGraph) -> PassResult:
    """A pass that changes one node."""
    graph.change(graph.of_kind("lookup")[0], combine="SUM")
    return PassResult(graph)


def moved(graph: OperatorGraph) -> PassResult:
    """A pass that puts another node in the place of one."""
    old = graph.of_kind("lookup")[1]
    with graph.graph.inserting_before(old):
        old.replace_all_uses_with(graph.graph.node_copy(old, lambda node: node))
    graph.graph.erase_node(old)
    return PassResult(graph)


@pytest.mark.parametrize(
    ("extra", "touched"), [(nothing, []), (pooling, ["ebc_lookup"]), (moved, ["ebc_lookup_1", "ebc_keyed_tensor"])]
)
def test_a_node_is_touched_if_it_is_another_one_afterwards(
    extra: Callable[[OperatorGraph], PassResult], touched: list[str]
) -> None:
    before = rewritten(collection(ADOPTED, ADOPTED), "expand_collection")
    made = run_passes(before, [Rewrite("extra", extra)])
    assert [name for name, meta in made.metas.items() if meta.passes[-1] == "extra"] == touched
    assert [record.name for record in made.records] == ["expand_collection", "extra"]
    assert made.records[-1].modified == bool(touched)


def test_records_hold_the_graph_as_it_was() -> None:
    texts: list[str] = []
    graph = collection(INDEXED, ADOPTED).unexpanded_graph()
    made = run_passes(graph, passes(), lambda _, graph: texts.append(format_graph(graph)))
    assert [record.text for record in made.records] == texts
    graph_module = collection(INDEXED, ADOPTED).graph_module
    metas = {node.name: meta for node in graph_module.graph.nodes if (meta := node_meta(node)) is not None}
    assert made.records[-1].metas == metas


def test_a_later_run_goes_on_where_the_earlier_one_has_ended() -> None:
    """As for the graph of eval mode, which is made from that of training."""
    before = rewritten(collection(INDEXED, INDEXED), "insert_hash")
    text = format_graph(before.graph)
    made = run_passes(before, [Rewrite("expand_again", pooling), Rewrite("moved", moved)])
    assert [record.name for record in made.records] == [
        "expand_collection", "insert_dist", "dedup_ids", "insert_hash", "expand_again", "moved",
    ]  # fmt: skip
    assert made.records[:4] == before.records
    assert made.metas["ebc_lookup_1"].passes == ("expand_collection", "insert_hash", "moved")
    assert made.metas["ebc_select_features"] == before.metas["ebc_select_features"]
    assert format_graph(before.graph) == text
