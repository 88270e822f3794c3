from recfx import HashConfig, HashEmbeddingBagCollection
from recfx.ir.tables import IdRange
from recfx.passes.elide_hash import elide_hash
from recfx.passes.insert_hash import insert_hash
from tests.passes.small_collection import INDEXED, after, collection, node, rewritten, table

PARTLY_DENSE = HashConfig(dense_rows=4)


def proven(first: HashConfig, second: HashConfig, *tables: int) -> HashEmbeddingBagCollection:
    """The collection, with ids of some of its tables known to be from 0 to 3."""
    converted = collection(first, second)
    for number in tables:
        object.__setattr__(converted.tables[number], "id_range", IdRange(0, 3))
    return converted


def test_ids_that_are_declared_to_be_rows_are_not_hashed_and_mean_is_a_mean_again() -> None:
    _, text, modified, declined = after("elide_hash", proven(PARTLY_DENSE, PARTLY_DENSE, 0, 1))
    assert modified
    assert declined == []
    assert (
        text
        == """\
features = input
ebc_select_features = select_features(features)
ebc_lookup = lookup(ebc_select_features) {tables=[users], combine=MEAN, dtype=float32}
ebc_lookup_1 = lookup(ebc_select_features) {tables=[ads], combine=SUM, dtype=float32}
ebc_keyed_tensor = keyed_tensor(ebc_lookup, ebc_lookup_1)
return ebc_keyed_tensor"""
    )


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
