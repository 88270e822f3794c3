"""The graph: each rule of the verifier broken alone, the declarations of kinds, and the text of nodes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType

import recfx
from recfx.ir import GraphVerificationError, format_graph, verify_graph
from recfx.ir.node_kinds import ASSEMBLERS, COMBINES, CUTS, NODE_KINDS, NOT_COMBINED, UNPOOLED_FORMS, ValueType
from recfx.ir.operator_graph import OperatorGraph
from recfx.ir.tables import TableSpec, columns_of, output_dtype, total_bytes
from tests.builders.optimizers import attach
from tests.passes.small_collection import INDEXED, collection, rewritten

Nodes = dict[str, fx.Node]


def feeds(user: str, *sources: str, add: bool = False) -> Callable[[OperatorGraph, Nodes], None]:
    """Give a node these inputs, or add them to those that it has."""

    def edit(graph: OperatorGraph, nodes: Nodes) -> None:
        nodes[user].args = (*(nodes[user].args if add else ()), *(nodes[source] for source in sources))

    return edit


def item_of(source: str, number: int) -> Callable[[OperatorGraph, Nodes], None]:
    def edit(graph: OperatorGraph, nodes: Nodes) -> None:
        with graph.graph.inserting_after(nodes[source]):
            item = graph.item(nodes[source], number, "item")
        nodes["ebc_lookup"].args = (item,)

    return edit


def again(name: str, user: str) -> Callable[[OperatorGraph, Nodes], None]:
    """Let a second node do what one does."""

    def edit(graph: OperatorGraph, nodes: Nodes) -> None:
        with graph.graph.inserting_after(nodes[name]):
            second = graph.graph.node_copy(nodes[name])
        nodes[user].args = (second,) if user == "ebc_lookup_1" else (*nodes[user].args, second)

    return edit


def all_values(graph: OperatorGraph, nodes: Nodes) -> None:
    """Let a lookup take both values of a node."""
    with graph.graph.inserting_after(nodes["ebc_select_features"]):
        started = graph.add("input_dist_start", (nodes["ebc_select_features"],), "")
    nodes["ebc_lookup"].args = (started,)


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (feeds("ebc_keyed_tensor", "ebc_select_features", add=True), "ebc_keyed_tensor: .* cannot be fed by ebc_sel"),
        (feeds("ebc_keyed_tensor", "ebc_hash_ids", add=True), "ebc_keyed_tensor: .* cannot be fed by ebc_hash_ids"),
        (feeds("ebc_lookup_1", "ebc_lookup", add=True), "ebc_lookup_1: a lookup cannot be fed by ebc_lookup, pooled"),
        (feeds("ebc_lookup", "features"), "ebc_lookup: a lookup cannot be fed by features, .*; input 0 is a KJT"),
        (feeds("ebc_mean_divide", "ebc_lookup"), "a mean_divide needs a KJT of selected ids as input 1"),
        (feeds("ebc_hash_ids"), "ebc_hash_ids: a hash_ids needs .* as input 0, but has none"),
        (feeds("ebc_keyed_tensor", "ebc_mean_divide"), "ebc_(lookup|mean_divide)_1: nothing uses this"),
        (all_values, "a input_dist_start returns 2 values: use one of its items"),
        (item_of("ebc_select_features", 0), "a select_features has no item 0"),
        (item_of("ebc_hash_ids", 2), "a hash_ids has no item 2"),
        (again("ebc_lookup", "ebc_keyed_tensor"), "table 'users' already has a lookup, ebc_lookup"),
        (again("ebc_hash_ids", "ebc_lookup_1"), "table 'users' already has a hash_ids, ebc_hash_ids"),
        (lambda _, nodes: nodes["ebc_select_features"].prepend(nodes["ebc_lookup"]), "ebc_(lookup|hash_ids)"),
    ],
)
def test_a_rule_that_is_broken(edit: Callable[[OperatorGraph, Nodes], None], rule: str) -> None:
    graph = rewritten(collection(INDEXED, INDEXED), "insert_hash").graph
    verify_graph(graph, after="nothing")
    edit(graph, {node.name: node for node in graph.graph.nodes})
    with pytest.raises(GraphVerificationError, match=f"after pass broken: .*{rule}"):
        verify_graph(graph, after="broken")


def test_a_fused_node_counts_as_both() -> None:
    graph = rewritten(collection(INDEXED, INDEXED), "fuse_hash_lookup").graph
    again("ebc_hash_lookup", "ebc_keyed_tensor")(graph, {node.name: node for node in graph.graph.nodes})
    with pytest.raises(GraphVerificationError, match="table 'users' already has a hash_ids"):
        verify_graph(graph, after="broken")


def test_the_cuts_are_in_the_order_of_the_stages() -> None:
    assert CUTS == ("input_dist_start", "input_dist_wait", "hash_ids", "output_dist_wait")
    stages = [NODE_KINDS[kind].stage.value for kind in CUTS]
    assert stages == sorted(stages)


def test_no_value_goes_back_to_an_earlier_stage() -> None:
    for giver in NODE_KINDS.values():
        for kind in NODE_KINDS.values():
            taken = {type_ for declared in kind.inputs for type_ in declared.types}
            if taken & set(giver.outputs):
                assert giver.stage.value <= kind.stage.value, (giver.name, kind.name)


def test_every_value_is_given_and_taken() -> None:
    produced = {type_ for kind in NODE_KINDS.values() for type_ in kind.outputs}
    taken = {type_ for kind in NODE_KINDS.values() for declared in kind.inputs for type_ in declared.types}
    begins = {ValueType.BATCH, *UNPOOLED_FORMS.values()}  # the latter are given where rows are not combined
    ends = {output for kind in ASSEMBLERS for output in NODE_KINDS[kind].outputs}
    assert begins | produced == ends | taken == set(ValueType)


def test_sizes_follow_the_dtype_of_the_output() -> None:
    def spec(name: str, output_dtype: torch.dtype) -> TableSpec:
        return TableSpec(name, (name,), (name,), 10, 4, "SUM", None, 0.0, 0.0, output_dtype=output_dtype)

    half, single = spec("half", torch.float16), spec("single", torch.float32)
    assert output_dtype((half,)) == torch.float16
    assert output_dtype((half, single)) == torch.float32
    assert output_dtype(()) == torch.float32
    assert total_bytes(columns_of((half, single))) == 4 * 2 + 4 * 4


def test_what_changes_what_runs_is_printed_as_it_is_now() -> None:
    plain = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])], is_weighted=True
    )
    attach(plain, torch.optim.Adagrad)
    converted: Any = recfx.convert(plain)
    line = "ebc_lookup = lookup(ebc_select_features) {tables=[t], combine=SUM, is_weighted, "
    assert f"{line}dtype=float32, optimizer=adagrad, kernel=cpu}}" in format_graph(converted.graph_module)
    assert "select_features(features) {is_weighted}" in format_graph(converted.graph_module)
    converted.to(torch.float64)
    assert f"{line}dtype=float64, optimizer=adagrad, kernel=reference}}" in format_graph(converted.graph_module)


def test_only_what_takes_rows_takes_them() -> None:
    graph = rewritten(collection(INDEXED, INDEXED), "expand_collection").graph
    for lookup in graph.of_kind("lookup"):
        graph.change(lookup, combine=NOT_COMBINED)
    with pytest.raises(GraphVerificationError, match="a keyed_tensor cannot be fed by ebc_lookup, a row for each id"):
        verify_graph(graph, after="edit")


def test_its_tables_have_the_same_number_of_columns() -> None:
    tables = [
        recfx.HashEmbeddingBagConfig(num_embeddings=8, embedding_dim=dim, name=f"t{dim}", feature_names=[f"f{dim}"])
        for dim in (4, 8)
    ]
    graph = rewritten(recfx.HashEmbeddingBagCollection(tables), "expand_collection").graph
    graph.change(graph.of_kind("lookup")[0], tables=("t4", "t8"), combine=NOT_COMBINED)
    with pytest.raises(GraphVerificationError, match=r"its tables have \[4, 8\] columns"):
        verify_graph(graph, after="edit")


def test_the_names_are_those_of_torchrec() -> None:
    assert tuple(pooling.name for pooling in PoolingType) == COMBINES
