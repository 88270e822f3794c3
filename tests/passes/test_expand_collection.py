from tests.passes.small_collection import ADOPTED, after, collection, rewritten


def test_one_leaf_becomes_a_lookup_a_table() -> None:
    _, text, modified, _ = after("expand_collection", collection(ADOPTED, ADOPTED))
    assert modified
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


def test_nodes_say_what_they_are_and_where_they_come_from() -> None:
    made = rewritten(collection(ADOPTED, ADOPTED), "expand_collection")
    by_name = made.metas
    lookup = by_name["ebc_lookup"]
    assert (lookup.kind, lookup.tables, lookup.made_by) == ("lookup", ("users",), "expand_collection")
    assert [str(size) for size in lookup.shape] == ["B", "8"]
    assert str(lookup.bytes) == "32*B"
    assert str(by_name["ebc_select_features"].shape[0]) == "B*(L_ad + L_friend + L_user)"
