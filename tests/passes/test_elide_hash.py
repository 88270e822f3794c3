from tests.passes.small_collection import ADOPTED, INDEXED, after, collection


def test_dense_ids_are_not_hashed_and_mean_is_a_mean_again() -> None:
    graph_module, text, modified, declined = after("elide_hash", collection(ADOPTED, ADOPTED))
    assert modified
    assert declined == []
    assert (
        text
        == """\
features = input
ebc_select_features = select_features(features)
ebc_lookup = lookup(ebc_select_features) {tables=[users], pooling=MEAN, dtype=float32}
ebc_lookup_1 = lookup(ebc_select_features) {tables=[ads], pooling=SUM, dtype=float32}
ebc_keyed_tensor = keyed_tensor(ebc_lookup, ebc_lookup_1)
return ebc_keyed_tensor"""
    )
    assert graph_module.get_submodule("lookup").pooling == "MEAN"
    assert not hasattr(graph_module, "hash_ids")


def test_tables_with_an_index_stay_hashed() -> None:
    graph_module, text, modified, declined = after("elide_hash", collection(ADOPTED, INDEXED))
    assert modified  # `users` has left hash_ids
    assert declined == ["has_index"]
    assert graph_module.get_submodule("hash_ids").hashed == ("ads",)
    assert "mean_divide" not in text


def test_nothing_to_elide() -> None:
    _, text, modified, declined = after("elide_hash", collection(INDEXED, INDEXED))
    assert not modified
    assert declined == ["has_index", "has_index"]
    assert "hash_ids" in text
    assert "mean_divide" in text
