"""The pipeline as a whole: names, and the verifier between passes."""

import importlib
import inspect
import re
from collections.abc import Callable

import pytest
import sympy

import recfx
from recfx import HashConfig
from recfx.ir import GraphVerificationError
from recfx.ir.meta import node_meta
from recfx.ir.operator_graph import OperatorGraph
from recfx.passes import export_passes
from recfx.passes.base import PassResult, Rewrite, run_passes
from tests.passes.small_collection import ADOPTED, INDEXED, collection, lowered, node, until


def test_recfx_passes_is_the_package_and_is_called_like_its_function() -> None:
    """Whatever the form of the import: code that reads ``recfx.passes`` finds the package."""
    package = importlib.import_module("recfx.passes")
    assert recfx.passes is package
    assert recfx.passes.export_passes is export_passes
    assert package.passes() == recfx.passes()
    assert str(inspect.signature(recfx.passes)) == str(inspect.signature(package.passes))


def of_another(graph: OperatorGraph) -> PassResult:
    node(graph, "ebc_lookup").kwargs = {**node(graph, "ebc_lookup").kwargs, "collection": "elsewhere"}
    return PassResult(graph)


def change(**attributes: object) -> Callable[[OperatorGraph], PassResult]:
    """Gives a lookup these attributes."""

    def rewrite(graph: OperatorGraph) -> PassResult:
        graph.change(node(graph, "ebc_lookup"), **attributes)
        return PassResult(graph)

    return rewrite


@pytest.mark.parametrize(
    ("broken", "name", "rule"),
    [
        (of_another, "elsewhere_lookup", "the graph is about no collection 'elsewhere'"),
        (change(tables=()), "ebc_lookup", "a lookup needs tables"),
        (change(tables=("other",)), "ebc_lookup", "its tables has 'other', which is none of its collection's here"),
        (change(tables="users"), "ebc_lookup", "its tables is 'users', not a tuple of plain values"),
        (change(tables=(("users",),)), "ebc_lookup", "not a tuple of plain values"),
        (change(combine=1), "ebc_lookup", "its combine is 1, not a str of plain values"),
        (change(way="row_wise"), "ebc_lookup", "a lookup has no attribute 'way'"),
    ],
)  # fmt: skip
def test_a_broken_pass_is_named_with_the_node(
    broken: Callable[[OperatorGraph], PassResult], name: str, rule: str
) -> None:
    pipeline = [*until("insert_hash"), Rewrite("broken", broken)]
    with pytest.raises(GraphVerificationError, match=re.escape(rule)) as caught:
        run_passes(collection(INDEXED, INDEXED).unexpanded_graph(), pipeline)
    assert f"after pass broken: node {name}: " in str(caught.value)


EVICTS = HashConfig(dense_rows=0, on_full="evict")


@pytest.mark.parametrize(
    ("first", "second"), [(INDEXED, INDEXED), (INDEXED, ADOPTED), (ADOPTED, ADOPTED), (EVICTS, ADOPTED)]
)
@pytest.mark.parametrize("last", range(1, 9))
def test_nodes_are_called_what_their_modules_are_and_say_what_they_hold(
    first: HashConfig, second: HashConfig, last: int
) -> None:
    graph_module = lowered(collection(first, second), list(recfx.passes()[:last]))
    calls = [node for node in graph_module.graph.nodes if node.op == "call_module"]
    assert {name for name, _ in graph_module.named_children()} == {str(call.target) for call in calls}
    for call in calls:
        meta = node_meta(call)
        assert meta is not None
        assert call.name == graph_module.get_submodule(str(call.target)).label == f"ebc_{call.target}"
        assert str(call.target).rstrip("_0123456789") == meta.kind
        assert meta.bytes == meta.dtype.itemsize * sympy.prod(meta.shape)
        assert (meta.collection, meta.device) == ("", "cpu")
        assert set(meta.tables) <= {"users", "ads"}
        assert meta.tables
    order = [rewrite.name for rewrite in recfx.passes()[:last]]
    assert {meta.made_by for call in calls if (meta := node_meta(call))} <= set(order)
