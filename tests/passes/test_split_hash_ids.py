"""split_hash_ids: the graph of a pipeline, which finds rows in one node and inserts in another."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torchrec import KeyedJaggedTensor

from recfx import HashConfig, HashEmbeddingBagCollection
from recfx.collections.compile_graph import compile_again
from recfx.collections.sharding.pipeline_stages import SPLIT_HASH_IDS, cut
from recfx.ir import format_graph
from recfx.ir.meta import node_meta
from recfx.runtime.lowered import Runtime
from tests.passes.small_collection import INDEXED, collection, lowered, until


def split(converted: HashEmbeddingBagCollection) -> fx.GraphModule:
    return compile_again(converted.graph_module, converted._runtime, (SPLIT_HASH_IDS,))[0]


def test_a_fused_node_becomes_four() -> None:
    converted = collection(INDEXED, INDEXED)
    before = format_graph(converted.graph_module)
    graph_module = split(converted)
    assert (
        format_graph(graph_module)
        == """\
features = input
ebc_select_features = select_features(features)
ebc_snapshot_indexes = snapshot_indexes()
ebc_find_ids = find_ids(ebc_select_features, ebc_snapshot_indexes) {hashed=[users, ads], operators=cpu}
ebc_insert_ids = insert_ids(ebc_select_features, ebc_find_ids) {hashed=[users, ads], operators=cpu}
ebc_lookup = lookup(ebc_insert_ids) {tables=[users, ads], combine=SUM, dtype=float32, kernel=cpu}
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[users]}
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide)
return ebc_keyed_tensor"""
    )
    kernels = {node.name: meta.kernel for node in graph_module.graph.nodes if (meta := node_meta(node)) is not None}
    assert {name for name, kernel in kernels.items() if kernel} == {"ebc_lookup"}
    assert kernels["ebc_lookup"] == "cpu"
    assert format_graph(converted.graph_module) == before  # the collection's own graph stays as it is


@pytest.mark.parametrize("config", [HashConfig(dense_rows=0, on_full="evict"), HashConfig(dense_rows=0, admit_after=2)])
def test_tables_that_count_every_id_are_declined(config: HashConfig) -> None:
    converted = collection(INDEXED, config)
    graph_module = lowered(converted, until("lower"))
    same, (record,) = compile_again(graph_module, Runtime(converted.store), (SPLIT_HASH_IDS,))
    (declined,) = record.declined
    assert (record.modified, declined.code, declined.node) == (False, "hashed_in_turn", "ebc_hash_lookup")
    assert declined.by == "split_hash_ids"
    assert "['ads']" in declined.message
    assert same is graph_module


def test_the_stages_of_the_split_graph() -> None:
    graph_module = split(collection(INDEXED, INDEXED))
    stages = cut(graph_module)
    made = {name: stage.outputs for name, stage in stages._asdict().items()}
    assert made == {
        "select": ["ebc_select_features"],
        "send": [],
        "snapshot": ["ebc_snapshot_indexes"],
        "arrive": ["ebc_find_ids"],
        "compute": ["ebc_lookup"],
        "collect": ["ebc_keyed_tensor"],
    }


def test_it_shares_indexes_and_counts_with_the_fused_graph() -> None:
    converted, fused = collection(INDEXED, INDEXED), collection(INDEXED, INDEXED)
    fused.load_state_dict(converted.state_dict())
    form = split(converted)
    keys = ["user", "friend", "ad"]
    for ids in ([1, 2, 3, 4], [1, 5, 3, 3], [1, 5, 3, 3], [9, 9, 9, 9]):
        batch = KeyedJaggedTensor(keys, torch.tensor(ids), lengths=torch.tensor([1, 1, 2]))
        assert torch.equal(form(batch).values(), fused(batch).values())
        assert torch.equal(converted(batch).values(), fused(batch).values())
    for table in ("users", "ads"):
        assert converted.index(table).counters["inserted"] == fused.index(table).counters["inserted"]
        assert converted.index(table).counters["batches"] == fused.index(table).counters["batches"] == 8
        assert converted.index(table).counters["ids_seen"] == fused.index(table).counters["ids_seen"]
    converted.eval()  # the mode is the collection's
    unseen = KeyedJaggedTensor(keys, torch.tensor([70]), lengths=torch.tensor([1, 0, 0]))
    assert form(unseen).values().abs().sum() == 0
    assert converted.index("users").counters["inserted"] == fused.index("users").counters["inserted"]
