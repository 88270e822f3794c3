from recfx import HashEmbeddingBagCollection
from tests.passes.small_collection import ADOPTED, INDEXED, after, collection, rewritten, table


def test_ids_are_hashed_before_any_lookup_and_mean_is_divided_after() -> None:
    _, text, modified, declined = after("insert_hash", collection(INDEXED, INDEXED))
    assert modified
    assert declined == []
    assert (
        text
        == """\
features = input
ebc_select_features = select_features(features)
ebc_hash_ids = hash_ids(ebc_select_features) {hashed=[users, ads]}
ebc_lookup = lookup(ebc_hash_ids) {tables=[users], combine=SUM, dtype=float32}
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[users]}
ebc_lookup_1 = lookup(ebc_hash_ids) {tables=[ads], combine=SUM, dtype=float32}
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide, ebc_lookup_1)
return ebc_keyed_tensor"""
    )


def test_tables_without_an_index_are_not_hashed() -> None:
    """Their ids are rows, whose range has been checked: a MEAN of theirs stays a MEAN, beside a hashed one."""
    tables = [table(name, INDEXED if name in "ac" else ADOPTED, mean=True) for name in "abcd"]
    _, text, modified, declined = after("insert_hash", HashEmbeddingBagCollection(tables))
    assert (modified, declined) == (True, [])
    assert (
        text
        == """\
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
    )
    assert after("insert_hash", collection(ADOPTED, ADOPTED))[2:] == (False, [])


def test_static_tables_are_declined_by_name() -> None:
    converted = collection(ADOPTED, ADOPTED)
    object.__setattr__(converted.tables[1], "hashing", None)
    (declined,) = rewritten(converted, "insert_hash").records[-1].declined
    assert (declined.by, declined.code, declined.node) == ("insert_hash", "static_table", "ebc_select_features")
    assert "'ads'" in declined.message
