"""``combine=NONE``: a lookup whose rows are not pooled is a legal value of the graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sympy
import torch
from torchrec import PoolingType

import recfx
from recfx.ir.context import LookupFacts, TableFacts
from recfx.ir.meta import BATCH, mean_length
from recfx.ir.node_kinds import COMBINES, NODE_KINDS, NOT_COMBINED, Input, NodeKind, Stage, ValueType
from recfx.ir.node_values import size_of
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.verifier import GraphVerificationError, verify_graph
from recfx.lowering.registry import BACKENDS, choose_backend
from recfx.passes.base import PassResult, Rewrite, run_passes
from tests.passes.small_collection import INDEXED, collection, rewritten, unexpanded, until
from tests.support.own_operators import forgotten_afterwards

DICT_OF_ROWS = NodeKind(
    "dict_of_rows",
    "the rows of each feature's ids",
    inputs=(Input((ValueType.UNPOOLED,), repeats=True),),
    outputs=(ValueType.KEYED_TENSOR,),
    stage=Stage.ASSEMBLE,
)


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    with forgotten_afterwards():
        NODE_KINDS["dict_of_rows"] = DICT_OF_ROWS
        yield


def not_combined(graph: OperatorGraph) -> PassResult:
    """Let all lookups return the rows of their ids, and return those."""
    (keyed,) = graph.of_kind("keyed_tensor")
    for lookup in graph.of_kind("lookup"):
        graph.change(lookup, combine=NOT_COMBINED)
    with graph.graph.inserting_before(keyed):
        graph.replace(keyed, graph.add("dict_of_rows", keyed.args, graph.collection(keyed).name))
    graph.remove_unused()
    return PassResult(graph)


def made(*more: str) -> OperatorGraph:
    """The graph of rows that are not combined, after these passes too."""
    expand, *rest = until("insert_hash")
    rewrites = [expand, Rewrite("not_combined", not_combined), *(rewrite for rewrite in rest if rewrite.name in more)]
    return run_passes(unexpanded(collection(INDEXED, INDEXED)), rewrites).graph


def test_its_value_has_a_row_for_each_id() -> None:
    graph = made()
    first, second = graph.of_kind("lookup")
    ids = BATCH * (mean_length("user") + mean_length("friend"))
    assert size_of(graph, first) == ((ids, sympy.Integer(4)), torch.float32)
    assert size_of(graph, second).shape == (BATCH * mean_length("ad"), 4)
    graph.change(first, combine="SUM")
    assert size_of(graph, first).shape == (BATCH, 8)


def test_only_what_takes_rows_takes_them() -> None:
    graph = rewritten(collection(INDEXED, INDEXED), "expand_collection").graph
    for lookup in graph.of_kind("lookup"):
        graph.change(lookup, combine=NOT_COMBINED)
    with pytest.raises(GraphVerificationError, match="a keyed_tensor cannot be fed by ebc_lookup, a row for each id"):
        verify_graph(graph, after="edit")
    graph = made()
    graph.change(graph.of_kind("lookup")[0], combine="SUM")
    with pytest.raises(GraphVerificationError, match="a dict_of_rows cannot be fed by ebc_lookup, pooled rows"):
        verify_graph(graph, after="edit")


def test_its_tables_have_the_same_number_of_columns() -> None:
    tables = [
        recfx.HashEmbeddingBagConfig(num_embeddings=8, embedding_dim=dim, name=f"t{dim}", feature_names=[f"f{dim}"])
        for dim in (4, 8)
    ]
    rewrites = [*until("expand_collection"), Rewrite("not_combined", not_combined)]
    graph = run_passes(unexpanded(recfx.HashEmbeddingBagCollection(tables)), rewrites).graph
    first, second = graph.of_kind("lookup")
    (rows,) = graph.of_kind("dict_of_rows")
    graph.change(first, tables=("t4", "t8"))
    rows.args = (first,)
    graph.graph.erase_node(second)
    with pytest.raises(GraphVerificationError, match=r"its tables have \[4, 8\] columns"):
        verify_graph(graph, after="edit")


def facts(combine: str) -> LookupFacts:
    spec = collection(INDEXED, INDEXED).tables[0]
    return LookupFacts((spec,), combine, False, (TableFacts(8, 4, torch.float32, "cpu"),))


def test_a_backend_without_it_declines_with_a_reason() -> None:
    for backend in BACKENDS:
        declined = backend.serves(facts(NOT_COMBINED))
        if NOT_COMBINED in backend.combines:
            assert declined is None or declined.code != "unsupported_combine"
            continue
        assert declined is not None
        assert (declined.code, declined.by) == ("unsupported_combine", backend.name)
        assert declined.message == f"backend {backend.name!r} has no kernel with combine=NONE."
    with pytest.raises(recfx.ConversionError, match="combine=NONE") as caught:
        choose_backend(facts(NOT_COMBINED), "fbgemm", "ebc")
    assert caught.value.reason == "backend_unusable"
    assert choose_backend(facts("SUM"), "auto", "ebc")[0].name == "cpu"


def test_the_names_are_those_of_torchrec() -> None:
    assert tuple(pooling.name for pooling in PoolingType) == COMBINES
