"""The passes of one collection: its graph as text after each, what changed, and what is declined."""

import copy
from dataclasses import replace

import pytest
import torch
from torchrec import KeyedJaggedTensor

from recfx import HashConfig, HashEmbeddingBagCollection
from recfx.collections.compile_graph import graphs_of_modes
from recfx.ir import format_graph
from recfx.ir.context import CollectionContext
from recfx.ir.tables import IdRange
from recfx.kernels.build import launch
from recfx.passes.batch_lookups import batch_lookups
from recfx.passes.elide_hash import elide_hash
from recfx.passes.insert_hash import insert_hash
from recfx.runtime.lowered import Runtime
from tests.passes.small_collection import ADOPTED, INDEXED, after, collection, lowered, node, rewritten, table, until
from tests.support.refusals import refused

PARTLY_DENSE = HashConfig(dense_rows=4)


def proven(first: HashConfig, second: HashConfig, *tables: int) -> HashEmbeddingBagCollection:
    """The collection, with ids of some of its tables known to be from 0 to 3."""
    converted = collection(first, second)
    for number in tables:
        object.__setattr__(converted.tables[number], "id_range", IdRange(0, 3))
    return converted


NOT_HASHED = """\
features = input
ebc_select_features = select_features(features)
ebc_lookup = lookup(ebc_select_features) {tables=[users], combine=MEAN, dtype=float32}
ebc_lookup_1 = lookup(ebc_select_features) {tables=[ads], combine=SUM, dtype=float32}
ebc_keyed_tensor = keyed_tensor(ebc_lookup, ebc_lookup_1)
return ebc_keyed_tensor"""
HASHED = """\
features = input
ebc_select_features = select_features(features)
ebc_hash_ids = hash_ids(ebc_select_features) {hashed=[users, ads]}
ebc_lookup = lookup(ebc_hash_ids) {tables=[users], combine=SUM, dtype=float32}
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[users]}
ebc_lookup_1 = lookup(ebc_hash_ids) {tables=[ads], combine=SUM, dtype=float32}
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide, ebc_lookup_1)
return ebc_keyed_tensor"""
BATCHED = """\
features = input
ebc_select_features = select_features(features)
ebc_hash_ids = hash_ids(ebc_select_features) {hashed=[users, ads]}
ebc_lookup = lookup(ebc_hash_ids) {tables=[users, ads], combine=SUM, dtype=float32}
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[users]}
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide)
return ebc_keyed_tensor"""


@pytest.mark.parametrize(
    ("name", "converted", "expected"),
    [
        ("expand_collection", collection(ADOPTED, ADOPTED), NOT_HASHED),
        ("insert_hash", collection(INDEXED, INDEXED), HASHED),
        ("elide_hash", proven(PARTLY_DENSE, PARTLY_DENSE, 0, 1), NOT_HASHED),
        ("batch_lookups", collection(INDEXED, INDEXED), BATCHED),
    ],
)
def test_graph_after_a_pass(name: str, converted: HashEmbeddingBagCollection, expected: str) -> None:
    assert after(name, converted)[1:] == (expected, True, [])


def test_nodes_say_what_they_are_and_where_they_come_from() -> None:
    made = rewritten(collection(ADOPTED, ADOPTED), "expand_collection")
    by_name = made.metas
    lookup = by_name["ebc_lookup"]
    assert (lookup.kind, lookup.tables, lookup.made_by) == ("lookup", ("users",), "expand_collection")
    assert [str(size) for size in lookup.shape] == ["B", "8"]
    assert str(lookup.bytes) == "32*B"
    assert str(by_name["ebc_select_features"].shape[0]) == "B*(L_ad + L_friend + L_user)"


def test_tables_without_an_index_are_not_hashed() -> None:
    """Their ids are rows, whose range has been checked: a MEAN of theirs stays a MEAN, beside a hashed one."""
    tables = [table(name, INDEXED if name in "ac" else ADOPTED, mean=True) for name in "abcd"]
    _, text, modified, declined = after("insert_hash", HashEmbeddingBagCollection(tables))
    assert (modified, declined) == (True, [])
    expected = """\
features = input
ebc_select_features = select_features(features)
ebc_hash_ids = hash_ids(ebc_select_features) {hashed=[a, c]}
ebc_lookup = lookup(ebc_hash_ids) {tables=[a], combine=SUM, dtype=float32}
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[a]}
ebc_lookup_1 = lookup(ebc_hash_ids) {tables=[b], combine=MEAN, dtype=float32}
ebc_lookup_2 = lookup(ebc_hash_ids) {tables=[c], combine=SUM, dtype=float32}
ebc_mean_divide_1 = mean_divide(ebc_lookup_2, ebc_select_features) {divided=[c]}
ebc_lookup_3 = lookup(ebc_hash_ids) {tables=[d], combine=MEAN, dtype=float32}
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide, ebc_lookup_1, ebc_mean_divide_1, ebc_lookup_3)
return ebc_keyed_tensor"""
    assert text == expected
    assert after("insert_hash", collection(ADOPTED, ADOPTED))[2:] == (False, [])


def test_static_tables_are_declined_by_name() -> None:
    converted = collection(ADOPTED, ADOPTED)
    object.__setattr__(converted.tables[1], "hashing", None)
    (declined,) = rewritten(converted, "insert_hash").records[-1].declined
    assert (declined.by, declined.code, declined.node) == ("insert_hash", "static_table", "ebc_select_features")
    assert "'ads'" in declined.message


def test_tables_without_a_proof_stay_hashed() -> None:
    graph, text, modified, declined = after("elide_hash", proven(PARTLY_DENSE, INDEXED, 0))
    assert modified  # `users` has left hash_ids
    assert declined == ["has_index"]
    assert node(graph, "ebc_hash_ids").kwargs["hashed"] == ("ads",)
    assert "mean_divide" not in text


def test_means_whose_ids_another_node_hashes_are_still_divided() -> None:
    """An operator of the user's may take the ids of some tables; then several nodes hash."""
    converted = HashEmbeddingBagCollection([table(name, PARTLY_DENSE, mean=True) for name in ("users", "ads")])
    object.__setattr__(converted.tables[0], "id_range", IdRange(0, 3))
    graph = rewritten(converted, "expand_collection").graph
    lookup, (select,) = graph.of_kind("lookup")[1], graph.of_kind("select_features")
    with graph.graph.inserting_before(lookup):
        lookup.args = (graph.add("to_host", (select,), ""),)
    assert len(insert_hash(graph).graph.of_kind("hash_ids")) == 2
    assert [lookup.kwargs["combine"] for lookup in elide_hash(graph).graph.of_kind("lookup")] == ["MEAN", "SUM"]
    assert [node.kwargs["divided"] for node in graph.of_kind("mean_divide")] == [("ads",)]


def test_tables_with_different_pooling_do_not() -> None:
    _, text, modified, _ = after("batch_lookups", collection(ADOPTED, ADOPTED))
    assert not modified
    assert text.count(" = lookup(") == 2


def test_columns_keep_the_standard_order_when_groups_are_not_adjacent() -> None:
    converted = HashEmbeddingBagCollection([table(name, ADOPTED, mean=name == "b") for name in "abc"])
    _, text, _, _ = after("batch_lookups", converted)
    assert [line.partition("{tables=[")[2].partition("]")[0] for line in text.splitlines() if "= lookup(" in line] == [
        "a, c",
        "b",
    ]
    kjt = KeyedJaggedTensor(["a", "b", "c"], torch.arange(6), lengths=torch.tensor([2, 2, 2]))
    pooled = converted(kjt)
    assert pooled.keys() == ["a", "b", "c"]
    weights = {name: converted.weight(name) for name in "abc"}
    torch.testing.assert_close(pooled["a"], weights["a"][[0, 1]].sum(0, keepdim=True))
    torch.testing.assert_close(pooled["b"], weights["b"][[2, 3]].mean(0, keepdim=True))
    torch.testing.assert_close(pooled["c"], weights["c"][[4, 5]].sum(0, keepdim=True))


def test_pooled_tables_of_different_widths_share_one_lookup() -> None:
    wide = replace(table("wide", ADOPTED), embedding_dim=8)
    _, text, modified, _ = after("batch_lookups", HashEmbeddingBagCollection([table("narrow", ADOPTED), wide]))
    assert modified
    assert "lookup(ebc_select_features) {tables=[narrow, wide], " in text


@pytest.mark.parametrize(("kernels", "lookups"), [(["reference"] * 2, 1), (["reference", "cpu"], 2)])
def test_kernels_that_passes_have_decided_on_stay(kernels: list[str], lookups: int) -> None:
    graph = rewritten(collection(INDEXED, INDEXED), "insert_hash").graph
    for lookup, kernel in zip(graph.of_kind("lookup"), kernels, strict=True):
        graph.change(lookup, kernel=kernel)
    assert [lookup.kwargs["kernel"] for lookup in batch_lookups(graph).graph.of_kind("lookup")] == kernels[:lookups]


@pytest.mark.parametrize("hashing", [(INDEXED, INDEXED), (ADOPTED, INDEXED), (ADOPTED, ADOPTED)])
def test_tables_on_the_host(hashing: tuple[HashConfig, HashConfig]) -> None:
    converted = collection(*hashing)
    _, before, _, _ = after("fuse_hash_lookup", converted)
    _, text, modified, declined = after("insert_transfers", converted)
    assert (text, modified, declined) == (before, False, [])


def test_tables_without_data() -> None:
    converted = HashEmbeddingBagCollection([table("t", INDEXED)], device="meta")
    _, text, modified, _ = after("insert_transfers", converted)
    assert not modified
    assert "to_host" not in text


def test_float32_tables_on_the_cpu_get_the_table_batched_kernel() -> None:
    graph, _, _, declined = after("lower", collection(INDEXED, INDEXED))
    assert node(graph, "ebc_hash_lookup").kwargs["kernel"] == "cpu"
    assert declined == []


def test_float64_falls_back_to_the_reference_and_says_why() -> None:
    converted = collection(ADOPTED, ADOPTED).to(torch.float64)
    graph, _, _, declined = after("lower", converted)
    assert {lookup.kwargs["kernel"] for lookup in graph.of_kind("lookup")} == {"reference"}
    assert declined == ["dtype"] * 4  # cpu and fbgemm, for each of the two lookups


def test_a_backend_named_by_the_user_is_used_or_is_an_error() -> None:
    converted = collection(ADOPTED, ADOPTED)
    graph = rewritten(converted, "lower", "reference").graph
    assert {lookup.kwargs["kernel"] for lookup in graph.of_kind("lookup")} == {"reference"}
    with refused("backend_unusable", match="bfloat16"):
        rewritten(converted.to(torch.bfloat16), "lower", "fbgemm")
    with refused("unknown_backend", match="'cuda_magic'"):
        rewritten(collection(ADOPTED, ADOPTED), "lower", "cuda_magic")


@pytest.mark.parametrize("hashing", [(INDEXED, INDEXED), (ADOPTED, INDEXED), (ADOPTED, ADOPTED)])
def test_rows_of_tables_on_the_host_are_found_there(hashing: tuple[object, object]) -> None:
    converted = collection(*hashing)  # type: ignore[arg-type]
    graph_module = lowered(converted, until("lower"))
    text = format_graph(graph_module)
    assert graphs_of_modes(graph_module, Runtime(converted.store))[:3] == (graph_module, graph_module, [])
    assert format_graph(graph_module) == text
    assert converted.eval().graph_module is converted.train().graph_module


def test_a_device_without_a_kernel_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the host were another device, to which rows have to be copied."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(CollectionContext, "copies_ids", property(lambda _: True))
    converted = copy.deepcopy(collection(INDEXED, ADOPTED))
    graph_module = lowered(converted, until("insert_hash"))
    *same, (record,), _ = graphs_of_modes(graph_module, Runtime(converted.store))
    assert same == [graph_module] * 2
    (declined,) = record.declined
    assert (record.name, declined.code, declined.by) == ("find_on_device", "found_on_host", "find_on_device")
    assert launch.why_not(converted.weight("ads").device) in declined.message
