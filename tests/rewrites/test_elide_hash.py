from torchrec import EmbeddingBagConfig, PoolingType

from recfx import HashConfig, HashEmbeddingBagCollection, HashEmbeddingBagConfig
from tests.rewrites.small_collection import ADOPTED, INDEXED, after, collection, node, rewritten


def test_dense_ids_are_not_hashed_and_mean_is_a_mean_again() -> None:
    _, text, modified, declined = after("elide_hash", collection(ADOPTED, ADOPTED))
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


def test_tables_with_an_index_stay_hashed() -> None:
    graph, text, modified, declined = after("elide_hash", collection(ADOPTED, INDEXED))
    assert modified  # `users` has left hash_ids
    assert declined == ["has_index"]
    assert node(graph, "ebc_hash_ids").kwargs["hashed"] == ("ads",)
    assert "mean_divide" not in text


def test_a_hashed_mean_stays_a_sum_beside_an_adopted_one() -> None:
    def mean(name: str, hashing: HashConfig) -> EmbeddingBagConfig:
        return HashEmbeddingBagConfig(
            name=name,
            num_embeddings=8,
            embedding_dim=4,
            feature_names=[name],
            pooling=PoolingType.MEAN,
            hashing=hashing,
        )

    tables = [mean("a", INDEXED), mean("b", ADOPTED), mean("c", INDEXED), mean("d", ADOPTED)]
    _, text, modified, declined = after("elide_hash", HashEmbeddingBagCollection(tables))
    assert (modified, declined) == (True, ["has_index", "has_index"])
    assert (
        text
        == """\
features = input
ebc_select_features = select_features(features)
ebc_hash_ids = hash_ids(ebc_select_features) {hashed=[a, c]}
ebc_lookup = lookup(ebc_hash_ids) {tables=[a], pooling=SUM, dtype=float32}
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[a]}
ebc_lookup_1 = lookup(ebc_hash_ids) {tables=[b], pooling=MEAN, dtype=float32}
ebc_lookup_2 = lookup(ebc_hash_ids) {tables=[c], pooling=SUM, dtype=float32}
ebc_mean_divide_1 = mean_divide(ebc_lookup_2, ebc_select_features) {divided=[c]}
ebc_lookup_3 = lookup(ebc_hash_ids) {tables=[d], pooling=MEAN, dtype=float32}
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide, ebc_lookup_1, ebc_mean_divide_1, ebc_lookup_3)
return ebc_keyed_tensor"""
    )


def test_what_is_declined_says_by_whom_and_where() -> None:
    (declined,) = rewritten(collection(INDEXED, ADOPTED), "elide_hash").records[-1].declined
    assert (declined.by, declined.node, declined.path) == ("elide_hash", "ebc_hash_ids", "")
    assert "'users'" in declined.message


def test_nothing_to_elide() -> None:
    _, text, modified, declined = after("elide_hash", collection(INDEXED, INDEXED))
    assert not modified
    assert declined == ["has_index", "has_index"]
    assert "hash_ids" in text
    assert "mean_divide" in text
