"""Every kind of table: converted, a collection answers and learns as the standard, unsharded one does."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.collections.hash_collections import HashEmbeddingBagCollection, HashEmbeddingBagConfig
from recfx.conversion.convert import convert
from recfx.hashing import HashConfig
from tests.builders.batches import batch
from tests.builders.collections import table
from tests.collections.as_standard import MEAN, SUM, TABLES, Tables, assert_same, each_backend, each_hashing, standard


@each_backend
@each_hashing
@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_every_kind_of_table(backend: str, hashing: HashConfig | None, tables: Tables, training: bool) -> None:
    oracle = standard(tables())
    converted = convert(copy.deepcopy(oracle), hashing=hashing, backend=backend).train(training)
    for batch_size in (1, 5):
        assert_same(oracle, converted, batch(batch_size))


@each_backend
def test_weights_of_an_unweighted_collection_are_not_used(backend: str) -> None:
    oracle = standard(TABLES["shared_features"]())
    converted = convert(copy.deepcopy(oracle), backend=backend)
    features = batch(6, weighted=True)
    features.weights().requires_grad_()
    assert_same(oracle, converted, features)


@each_backend
@pytest.mark.parametrize("is_weighted", [False, True], ids=["unweighted", "weighted"])
def test_half_precision_tables(backend: str, is_weighted: bool) -> None:
    tables = [table("t1", ["f1"], data_type=DataType.FP16), table("t2", ["f2"], data_type=DataType.FP16, dim=6)]
    oracle = standard(tables, is_weighted)
    converted = convert(copy.deepcopy(oracle), backend=backend)
    if is_weighted:  # the standard collection wants the batch's weights in the tables' dtype
        features = batch(5, weighted=True)
        half = KeyedJaggedTensor(
            features.keys(), features.values(), features.weights().half(), lengths=features.lengths()
        )
        half.weights().requires_grad_()
        assert_same(oracle, converted, half, rtol=1e-2, atol=1e-2)
    else:
        assert_same(oracle, converted, batch(5), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
@pytest.mark.parametrize("when", ["before", "after"])
def test_cast_tables(cast: Callable[[nn.Module], nn.Module], when: str) -> None:
    """Cast before or after conversion; the output is float32 all the same."""
    oracle = standard(TABLES["shared_features"]())
    model = copy.deepcopy(oracle)
    converted = convert(cast(model)) if when == "before" else cast(convert(model))
    tolerance = {nn.Module.half: 1e-2, nn.Module.bfloat16: 2e-2, nn.Module.double: 1e-6}[cast]
    assert_same(cast(oracle), converted, batch(5), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mixed", ["in_the_config", "after_conversion"])
def test_tables_of_two_dtypes(mixed: str) -> None:
    """Also where they come apart after one kernel call was made for both."""
    types = [DataType.FP32, DataType.FP16] if mixed == "in_the_config" else [DataType.FP32] * 2
    tables = [
        table("t1", ["f1"], data_type=types[0]),
        table("t2", ["f2"], data_type=types[1]),
        table("t3", ["f3"], data_type=types[0]),
    ]
    oracle = standard(tables)
    converted = convert(copy.deepcopy(oracle))
    if mixed == "after_conversion":
        converted(batch(5))
        for model in (oracle, converted):
            model.embedding_bags["t2"].half()
    assert_same(oracle, converted, batch(5), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("pooling", [SUM, MEAN])
def test_bfloat16_tables_built_directly(pooling: PoolingType) -> None:
    """The standard collection makes float16 of them, so that it is cast to be the oracle."""
    tables = [table("t1", ["f1"], pooling=pooling), table("t2", ["f2", "f3"], pooling=pooling)]
    hashed = [
        HashEmbeddingBagConfig(
            name=config.name,
            feature_names=config.feature_names,
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            pooling=config.pooling,
            data_type=DataType.BF16,
            hashing=HashConfig(dense_rows=config.num_embeddings),
        )
        for config in tables
    ]
    built = HashEmbeddingBagCollection(hashed)
    oracle = standard(tables).bfloat16()
    assert all(weight.dtype == torch.bfloat16 for weight in built.parameters())
    built.load_state_dict(oracle.state_dict())
    assert_same(oracle, built, batch(5), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    """TorchRec names the tables' dtype; whatever else is allocated must follow the tables, not the default."""
    torch.set_default_dtype(dtype)  # put back after every test
    oracle = standard(TABLES["sum_and_mean"]())
    converted = convert(copy.deepcopy(oracle))
    assert_same(oracle, converted, batch(5))


@each_hashing
def test_init_fn_fills_a_table_once(hashing: HashConfig | None) -> None:
    """Conversion keeps what it filled in."""
    oracle = standard([table("t1", ["f1"], init_fn=lambda weight: nn.init.constant_(weight, 0.25))])
    converted = convert(copy.deepcopy(oracle), hashing=hashing)
    assert (converted.embedding_bags["t1"].weight[:20] == 0.25).all()
    assert_same(oracle, converted, batch(4))


@pytest.mark.parametrize("device", ["meta", torch.device("meta")], ids=["name", "device"])
@each_hashing
def test_meta_tables_are_allocated_later(device: torch.device | str, hashing: HashConfig | None) -> None:
    tables = TABLES["shared_features"]
    converted = convert(EmbeddingBagCollection(tables=tables(), device=device), hashing=hashing)
    assert all(weight.is_meta for weight in converted.parameters())
    converted.to_empty(device="cpu")
    converted.reset_parameters()
    for config in tables():
        weight = converted.embedding_bags[config.name].weight
        assert weight.min() >= config.get_weight_init_min()
        assert weight.max() <= config.get_weight_init_max()
        assert weight.std() > 0
    oracle = standard(tables())
    for name, weight in oracle.embedding_bags.items():
        with torch.no_grad():
            weight.weight.copy_(converted.embedding_bags[name].weight[:20])
    assert_same(oracle, converted, batch(5))


def test_meta_tables_are_allocated_by_convert() -> None:
    model = EmbeddingBagCollection(tables=TABLES["sum"](), device="meta")
    converted = convert(model, device="cpu")
    assert all(weight.is_meta for weight in model.parameters())
    for config in converted.embedding_bag_configs():
        weight = converted.weight(config.name)
        assert config.get_weight_init_min() <= weight.min() < weight.max() <= config.get_weight_init_max()
    oracle = standard(TABLES["sum"]())
    oracle.load_state_dict(converted.state_dict())
    assert_same(oracle, converted, batch(5))


def test_more_threads_than_one(two_threads: None) -> None:
    """Enough ids that kernels do share the work."""
    oracle = standard(
        [table("t1", ["f1", "f2"], dim=32, rows=500), table("t2", ["f3"], dim=16, rows=400, pooling=MEAN)]
    )
    converted = convert(copy.deepcopy(oracle))
    # Thousands of additions to one row, in another order.
    assert_same(oracle, converted, batch(2000, rows=400), rtol=1e-4, atol=1e-3)
