"""The module that a node calls."""

from __future__ import annotations

from recfx.ir.meta import find_module
from recfx.runtime import Lookup
from tests.passes.small_collection import INDEXED, collection, lowered, until


def test_the_module_that_a_node_calls() -> None:
    graph_module = lowered(collection(INDEXED, INDEXED), until("insert_hash"))
    nodes = {node.name: node for node in graph_module.graph.nodes}
    found = find_module(graph_module, nodes["ebc_lookup_1"])
    assert isinstance(found, Lookup)
    assert found is graph_module.get_submodule("lookup_1")
    assert find_module(graph_module, nodes["features"]) is None
    nodes["ebc_lookup"].target = "nowhere"
    assert find_module(graph_module, nodes["ebc_lookup"]) is None
