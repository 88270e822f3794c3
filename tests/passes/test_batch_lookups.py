import torch
from torchrec import KeyedJaggedTensor

from recfx import HashEmbeddingBagCollection
from tests.passes.small_collection import ADOPTED, INDEXED, after, collection


def test_hashed_tables_share_one_lookup() -> None:
    graph_module, text, modified, _ = after("batch_lookups", collection(INDEXED, INDEXED))
    assert modified
    assert (
        text
        == """\
features = input
ebc_select_features = select_features(features)
ebc_hash_ids = hash_ids(ebc_select_features) {hashed=[users, ads], operators=cpu}
ebc_lookup = lookup(ebc_hash_ids) {tables=[users, ads], pooling=SUM, dtype=float32}
ebc_mean_divide = mean_divide(ebc_lookup, ebc_select_features) {divided=[users]}
ebc_keyed_tensor = keyed_tensor(ebc_mean_divide)
return ebc_keyed_tensor"""
    )
    assert graph_module.get_submodule("mean_divide").divided == ("users",)


def test_tables_with_different_pooling_do_not() -> None:
    _, text, modified, _ = after("batch_lookups", collection(ADOPTED, ADOPTED))
    assert not modified
    assert text.count(" = lookup(") == 2


def test_columns_keep_the_standard_order_when_groups_are_not_adjacent() -> None:
    # users (SUM after hashing) | items (adopted, SUM) | again: MEAN adopted between two SUM tables
    from torchrec import EmbeddingBagConfig, PoolingType

    from recfx import HashEmbeddingBagConfig

    def table(name: str, pooling: PoolingType) -> EmbeddingBagConfig:
        return HashEmbeddingBagConfig(
            name=name, num_embeddings=8, embedding_dim=4, feature_names=[name], pooling=pooling, hashing=ADOPTED
        )

    converted = HashEmbeddingBagCollection(
        [table("a", PoolingType.SUM), table("b", PoolingType.MEAN), table("c", PoolingType.SUM)]
    )
    parts = converted.graph_module.get_submodule("keyed_tensor").parts
    assert [[columns.key for columns in part] for part in parts] == [["a", "c"], ["b"]]
    kjt = KeyedJaggedTensor(["a", "b", "c"], torch.arange(6), lengths=torch.tensor([2, 2, 2]))
    pooled = converted(kjt)
    assert pooled.keys() == ["a", "b", "c"]
    weights = {name: converted.weight(name) for name in "abc"}
    torch.testing.assert_close(pooled["a"], weights["a"][[0, 1]].sum(0, keepdim=True))
    torch.testing.assert_close(pooled["b"], weights["b"][[2, 3]].mean(0, keepdim=True))
    torch.testing.assert_close(pooled["c"], weights["c"][[4, 5]].sum(0, keepdim=True))
