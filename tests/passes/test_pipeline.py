"""The pipeline as a whole: order, names, callback, and the verifier between passes."""

import importlib
import inspect
from dataclasses import dataclass

import pytest
import sympy
from torch import fx

import recfx
from recfx import HashConfig
from recfx.ir import GraphVerificationError
from recfx.ir.typed_access import meta_of
from recfx.passes import Pass, PassResult, run_passes
from tests.passes.small_collection import ADOPTED, INDEXED, collection


def test_the_order_is_one_literal_list_and_names_are_file_names() -> None:
    names = [rewrite.name for rewrite in recfx.passes()]
    assert names == [
        "expand_collection",
        "insert_dist",
        "insert_hash",
        "elide_hash",
        "batch_lookups",
        "fuse_hash_lookup",
        "insert_transfers",
        "lower",
    ]
    for rewrite in recfx.passes():
        assert type(rewrite).__module__ == f"recfx.passes.{rewrite.name}"


def test_recfx_passes_is_the_package_and_is_called_like_its_function() -> None:
    """Whatever the form of the import: code that reads ``recfx.passes`` finds the package."""
    package = importlib.import_module("recfx.passes")
    assert recfx.passes is package
    assert recfx.passes.run_passes is run_passes
    assert package.passes("reference") == recfx.passes(backend="reference") == recfx.passes("reference")
    assert recfx.passes("reference") != recfx.passes()
    assert str(inspect.signature(recfx.passes)) == str(inspect.signature(package.passes))


def test_the_callback_sees_the_graph_after_each_pass() -> None:
    seen: list[tuple[str, int]] = []
    converted = collection(INDEXED, INDEXED)
    run_passes(
        converted.unexpanded_graph(), recfx.passes(), lambda name, graph: seen.append((name, len(graph.graph.nodes)))
    )
    assert [name for name, _ in seen] == [rewrite.name for rewrite in recfx.passes()]
    assert [nodes for _, nodes in seen[:3]] == [6, 6, 8]


@dataclass(frozen=True)
class DropHashing:
    """A broken pass: it feeds raw ids to mean_divide's lookup and leaves hash_ids without users."""

    name: str = "drop_hashing"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        (hash_ids,) = [node for node in graph_module.graph.nodes if node.name == "ebc_hash_ids"]
        hash_ids.replace_all_uses_with(hash_ids.args[0])
        return PassResult(graph_module, modified=True)


@dataclass(frozen=True)
class LookUpTwice:
    """A broken pass: it looks one table up twice."""

    name: str = "look_up_twice"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        (lookup,) = [node for node in graph_module.graph.nodes if node.name == "ebc_lookup_1"]
        (output,) = [node for node in graph_module.graph.nodes if node.name == "ebc_keyed_tensor"]
        with graph_module.graph.inserting_before(output):
            again = graph_module.graph.node_copy(lookup)
            again.args = lookup.args
        output.args = (*output.args, again)
        return PassResult(graph_module, modified=True)


@dataclass(frozen=True)
class CallNothing:
    """A broken pass: it calls a module that does not exist."""

    name: str = "call_nothing"

    def call(self, graph_module: fx.GraphModule) -> PassResult:
        next(node for node in graph_module.graph.nodes if node.name == "ebc_lookup").target = "nowhere"
        return PassResult(graph_module, modified=True)


@pytest.mark.parametrize(
    ("broken", "node", "rule"),
    [
        (DropHashing(), "ebc_hash_ids", "nothing uses this hash_ids"),
        (LookUpTwice(), "ebc_lookup_2", "already has a lookup"),
        (CallNothing(), "ebc_lookup", "nowhere"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_broken_pass_is_named_with_the_node(broken: Pass, node: str, rule: str) -> None:
    converted = collection(INDEXED, INDEXED)
    with pytest.raises(GraphVerificationError, match=rule) as caught:
        run_passes(converted.unexpanded_graph(), (*recfx.passes()[:3], broken))
    assert f"after pass {broken.name}" in str(caught.value)
    assert node in str(caught.value)


EVICTS = HashConfig(dense_rows=0, on_full="evict")


@pytest.mark.parametrize(
    ("first", "second"), [(INDEXED, INDEXED), (INDEXED, ADOPTED), (ADOPTED, ADOPTED), (EVICTS, ADOPTED)]
)
@pytest.mark.parametrize("last", range(1, 9))
def test_nodes_are_called_what_their_modules_are_and_say_what_they_hold(
    first: HashConfig, second: HashConfig, last: int
) -> None:
    graph_module = collection(first, second).unexpanded_graph()
    run_passes(graph_module, recfx.passes()[:last])
    calls = [node for node in graph_module.graph.nodes if node.op == "call_module"]
    assert {name for name, _ in graph_module.named_children()} == {str(node.target) for node in calls}
    for node in calls:
        meta = meta_of(node)
        assert node.name == graph_module.get_submodule(str(node.target)).label == f"ebc_{node.target}"
        assert str(node.target).rstrip("_0123456789") == meta.kind
        assert meta.bytes == meta.dtype.itemsize * sympy.prod(meta.shape)
        assert (meta.collection, meta.device) == ("", "cpu")
        assert set(meta.tables) <= {"users", "ads"}
        assert meta.tables
    order = [rewrite.name for rewrite in recfx.passes()[:last]]
    assert {meta_of(node).made_by for node in calls} <= set(order)
