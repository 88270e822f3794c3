"""Modules and metadata of nodes, of known type."""

from __future__ import annotations

import pytest

from recfx.ir import GraphVerificationError
from recfx.ir.typed_access import find_module, meta_of, node_module
from recfx.nodes import HashIds, Lookup
from tests.rewrites.small_collection import INDEXED, collection, lowered, until


def test_the_module_that_a_node_calls() -> None:
    graph_module = lowered(collection(INDEXED, INDEXED), until("insert_hash"))
    nodes = {node.name: node for node in graph_module.graph.nodes}
    assert node_module(graph_module, nodes["ebc_lookup_1"], Lookup) is graph_module.get_submodule("lookup_1")
    assert meta_of(nodes["ebc_lookup_1"]).tables == ("ads",)
    with pytest.raises(GraphVerificationError, match="node ebc_lookup calls a Lookup, not a HashIds"):
        node_module(graph_module, nodes["ebc_lookup"], HashIds)
    assert find_module(graph_module, nodes["features"]) is None
    with pytest.raises(GraphVerificationError, match="node features calls no module, not a Lookup"):
        node_module(graph_module, nodes["features"], Lookup)
    with pytest.raises(GraphVerificationError, match="node features has no recfx metadata"):
        meta_of(nodes["features"])
    nodes["ebc_lookup"].target = "nowhere"
    with pytest.raises(GraphVerificationError, match="node ebc_lookup calls no module, not a Lookup"):
        node_module(graph_module, nodes["ebc_lookup"], Lookup)
