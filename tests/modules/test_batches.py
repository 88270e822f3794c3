"""Every kind of table and batch: converted, a collection answers as the standard, unsharded one does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from recfx.conversion.convert import convert
from recfx.hashing import HashConfig
from recfx.modules.collection import HashEmbeddingBagCollection
from recfx.modules.embedding_bag_config import HashEmbeddingBagConfig
from tests.builders.batches import batch
from tests.builders.collections import table

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN

each_backend = pytest.mark.parametrize("backend", ["reference", "fbgemm"])
each_hashing = pytest.mark.parametrize(
    "hashing", [HashConfig(), None, HashConfig(rows=64)], ids=["dense", "static", "grown"]
)
"""Ways to adopt a table: its ids are its rows in all of them."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The tables are tiny: threads would only wait for each other, long where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Tables = Callable[[], list[EmbeddingBagConfig]]

TABLES: dict[str, Tables] = {
    "sum": lambda: [table("t1", ["f1"]), table("t2", ["f2"]), table("t3", ["f3"])],
    "mean": lambda: [table("t1", ["f1"], pooling=MEAN), table("t2", ["f2", "f3"], pooling=MEAN)],
    "sum_and_mean": lambda: [
        table("t1", ["f1"], pooling=MEAN),
        table("t2", ["f2"], pooling=SUM),
        table("t3", ["f3"], pooling=MEAN),
    ],
    "several_features": lambda: [table("t1", ["f3", "f1"]), table("t2", ["f2"])],
    "shared_features": lambda: [
        table("t1", ["f1", "f2"], dim=4),
        table("t2", ["f2"], dim=6, pooling=MEAN),
        table("t3", ["f3", "f1", "f2"], dim=8),
    ],
    "unequal_dims": lambda: [
        table("t1", ["f1"], dim=1, rows=20),
        table("t2", ["f2"], dim=7, rows=33, pooling=MEAN),
        table("t3", ["f3"], dim=64, rows=50),
    ],
    "one_table": lambda: [table("t1", ["f2"])],
    "unnamed_feature": lambda: [table("f1", [])],
    "many": lambda: [
        table(f"t{i}", [f"f{1 + i % 3}"], dim=4 + i % 3, pooling=MEAN if i % 2 else SUM) for i in range(12)
    ],
}


def standard(tables: list[EmbeddingBagConfig], is_weighted: bool = False) -> EmbeddingBagCollection:
    """The oracle."""
    return EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)


def assert_same(
    oracle: nn.Module,
    converted: nn.Module,
    features: KeyedJaggedTensor,
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    expected: KeyedJaggedTensor | None = None,
) -> None:
    """Outputs, and gradients of tables and of the batch's weights; the oracle may be fed ``expected`` instead."""
    wanted_features = features if expected is None else expected
    wanted, found = oracle(_with_own_weights(wanted_features)), converted(_with_own_weights(features))
    assert isinstance(found, KeyedTensor)
    assert found.keys() == wanted.keys()
    assert found.length_per_key() == wanted.length_per_key()
    torch.testing.assert_close(found.values(), wanted.values(), rtol=rtol, atol=atol)
    gradients = [_gradients(oracle, wanted_features), _gradients(converted, features)]
    assert gradients[1].keys() == gradients[0].keys()
    for name, wanted_gradient in gradients[0].items():
        gradient = gradients[1][name]
        gradient = gradient[: wanted_gradient.shape[0]]  # a table may have grown: nothing reached its new rows
        assert not gradients[1][name][wanted_gradient.shape[0] :].any(), name
        torch.testing.assert_close(gradient, wanted_gradient, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def _with_own_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights = features.weights_or_none()
    if weights is None or features.variable_stride_per_key():
        return features
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        weights.detach().clone().requires_grad_(weights.requires_grad),
        lengths=features.lengths(),
        stride=features.stride(),
    )


def _gradients(model: nn.Module, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
    features = _with_own_weights(features)
    model.zero_grad(set_to_none=True)
    values = model(features).values()
    scale = torch.linspace(-1, 2, values.numel()).view_as(values)
    (values * scale).sum().backward()
    found = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    weights = features.weights_or_none()
    if weights is not None and weights.grad is not None:
        found["per_sample_weights"] = weights.grad.clone()
    return found


# Tables


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
@each_hashing
@pytest.mark.parametrize("requires_grad", [False, True], ids=["fixed", "learned"])
@pytest.mark.parametrize("tables", ["sum", "several_features", "shared_features_of_sums", "unequal_dims_of_sums"])
def test_weighted(backend: str, hashing: HashConfig | None, requires_grad: bool, tables: str) -> None:
    made = {
        "sum": TABLES["sum"],
        "several_features": TABLES["several_features"],
        "shared_features_of_sums": lambda: [table("t1", ["f1", "f2"], dim=4), table("t2", ["f2"], dim=6)],
        "unequal_dims_of_sums": lambda: [table("t1", ["f1"], dim=3), table("t2", ["f3"], dim=9)],
    }[tables]()
    oracle = standard(made, is_weighted=True)
    converted = convert(copy.deepcopy(oracle), hashing=hashing, backend=backend)
    features = batch(6, weighted=True)
    features.weights().requires_grad_(requires_grad)
    assert_same(oracle, converted, features)


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


def test_init_fn_of_a_collection_that_is_built_directly() -> None:
    config = HashEmbeddingBagConfig(
        name="t1",
        feature_names=["f1"],
        num_embeddings=20,
        embedding_dim=4,
        init_fn=lambda weight: nn.init.constant_(weight, 0.25),
    )
    built = HashEmbeddingBagCollection([config])
    ids = torch.tensor([-5, 2**60, 7])
    pooled = built(KeyedJaggedTensor(["f1"], ids, lengths=torch.tensor([1, 2])))
    assert torch.equal(pooled.values(), torch.tensor([[0.25] * 4, [0.5] * 4]))


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
    assert not any(weight.is_meta for weight in converted.parameters())
    oracle = standard(TABLES["sum"]())
    oracle.load_state_dict(converted.state_dict())
    assert_same(oracle, converted, batch(5))


def test_more_threads_than_one() -> None:
    """Enough ids that kernels do share the work."""
    torch.set_num_threads(2)
    oracle = standard(
        [table("t1", ["f1", "f2"], dim=32, rows=500), table("t2", ["f3"], dim=16, rows=400, pooling=MEAN)]
    )
    converted = convert(copy.deepcopy(oracle))
    # Thousands of additions to one row, in another order.
    assert_same(oracle, converted, batch(2000, rows=400), rtol=1e-4, atol=1e-3)


# Batches


@each_backend
@pytest.mark.parametrize("tables", ["sum_and_mean", "several_features", "shared_features"])
@pytest.mark.parametrize(
    "keys",
    [
        ("f3", "f1", "f2"),
        ("f1", "other", "f2", "f3"),
        ("other", "f3", "f2", "more", "f1"),
    ],
    ids=["another_order", "excess", "both"],
)
@pytest.mark.parametrize("is_weighted", [False, True], ids=["unweighted", "weighted"])
def test_features_are_selected_by_name(backend: str, tables: str, keys: tuple[str, ...], is_weighted: bool) -> None:
    made = TABLES[tables]()
    for config in made:
        config.pooling = SUM if is_weighted else config.pooling
    oracle = standard(made, is_weighted)
    converted = convert(copy.deepcopy(oracle), backend=backend)
    features = batch(6, keys, weighted=is_weighted)
    if is_weighted:
        features.weights().requires_grad_()
    assert_same(oracle, converted, features)
    assert_same(oracle, converted, batch(3, keys[::-1], weighted=is_weighted))  # the order may change from call to call


@each_backend
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", ["lengths", "offsets", "both"])
def test_integer_types(backend: str, ids: torch.dtype, offsets: torch.dtype, form: str) -> None:
    oracle = standard(TABLES["shared_features"]())
    converted = convert(copy.deepcopy(oracle), backend=backend)
    same = batch(6, ("f2", "f3", "f1"))
    features = KeyedJaggedTensor(
        same.keys(),
        same.values().to(ids),
        lengths=None if form == "offsets" else same.lengths().to(offsets),
        offsets=None if form == "lengths" else same.offsets().to(offsets),
    )
    assert_same(oracle, converted, features, expected=same)


@each_backend
@each_hashing
@pytest.mark.parametrize("tables", ["sum_and_mean", "shared_features"])
@pytest.mark.parametrize(
    "lengths",
    [[0, 0, 0, 0, 0, 0], [0, 0, 3, 1, 0, 2], [2, 1, 0, 0, 1, 1], [1, 2, 1, 0, 0, 0], [0, 0, 0, 0, 0, 9]],
    ids=["nothing", "first_feature", "middle_feature", "last_feature", "one_bag_only"],
)
def test_empty_features(backend: str, hashing: HashConfig | None, tables: str, lengths: list[int]) -> None:
    """A batch of two samples in which whole features have no id."""
    oracle = standard(TABLES[tables]())
    converted = convert(copy.deepcopy(oracle), hashing=hashing, backend=backend)
    features = KeyedJaggedTensor(
        ["f1", "f2", "f3"], torch.randint(0, 20, (sum(lengths),)), lengths=torch.tensor(lengths)
    )
    assert_same(oracle, converted, features)


@each_backend
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("hashing", [HashConfig(), None, HashConfig(dense_rows=0)], ids=["dense", "static", "hashed"])
@pytest.mark.parametrize("tables", ["sum_and_mean", "shared_features"])
@pytest.mark.parametrize("keys", [("f1", "f2", "f3"), ("f3", "other", "f2", "f1")], ids=["in_order", "permuted"])
def test_a_batch_of_no_samples(
    backend: str, training: bool, hashing: HashConfig | None, tables: str, keys: tuple[str, ...]
) -> None:
    """The standard collection fails on it (``to_dict`` of a batch without lengths), so the answer is spelled out."""
    oracle = standard(TABLES[tables]())
    converted = convert(copy.deepcopy(oracle), hashing=hashing, backend=backend).train(training)
    features = KeyedJaggedTensor(
        list(keys), torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64), stride=0
    )
    pooled = converted(features)
    wanted = oracle(batch(1))
    assert pooled.keys() == wanted.keys()
    assert pooled.values().shape == (0, wanted.values().shape[1])
    assert pooled.values().dtype == torch.float32
    pooled.values().sum().backward()
    for weight in converted.parameters():
        assert weight.grad is None or not weight.grad.any()


@each_backend
@pytest.mark.parametrize("tables", ["sum_and_mean", "several_features", "shared_features"])
@pytest.mark.parametrize("keys", [("f1", "f2", "f3"), ("f3", "other", "f1", "f2")], ids=["in_order", "permuted"])
def test_variable_batch_per_feature(backend: str, tables: str, keys: tuple[str, ...]) -> None:
    oracle = standard(TABLES[tables]())
    converted = convert(copy.deepcopy(oracle), backend=backend)
    strides = [2, 5, 3, 4][: len(keys)]
    lengths = torch.randint(0, 4, (sum(strides),))
    inverse = torch.stack([torch.randint(0, stride, (6,)) for stride in strides])

    def features() -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            list(keys),
            torch.arange(int(lengths.sum())) % 20,
            lengths=lengths,
            stride_per_key_per_rank=[[stride] for stride in strides],
            inverse_indices=(list(keys), inverse),
        )

    assert_same(oracle, converted, features(), expected=features())


def test_inverse_indices_in_another_order_than_the_keys() -> None:
    oracle = standard(TABLES["sum"]())
    converted = convert(copy.deepcopy(oracle))
    keys, strides = ["f1", "f2", "f3"], [3, 3, 3]
    features = KeyedJaggedTensor(
        keys,
        torch.arange(9),
        lengths=torch.ones(9, dtype=torch.int64),
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=(["f3", "f1", "f2"], torch.tensor([[0, 0, 1, 2], [2, 1, 0, 0], [1, 1, 1, 2]])),
    )
    assert_same(oracle, converted, features)


# Random batches


@st.composite
def jagged(draw: st.DrawFn) -> KeyedJaggedTensor:
    """A batch of f1, f2 and f3, in any order, with others between them; as lengths or offsets, weighted or not."""
    keys = draw(st.permutations(["f1", "f2", "f3", *draw(st.lists(st.sampled_from("xyz"), unique=True))]))
    batch_size = draw(st.integers(1, 6))
    bags = len(keys) * batch_size
    lengths = torch.tensor(draw(st.lists(st.integers(0, 5), min_size=bags, max_size=bags)))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    total = int(lengths.sum())
    values = torch.tensor(draw(st.lists(st.integers(0, 19), min_size=total, max_size=total)), dtype=dtype)
    weights = torch.rand(total)
    weights.requires_grad_(draw(st.booleans()))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    by_offsets = draw(st.booleans())
    return KeyedJaggedTensor(
        list(keys),
        values,
        weights,
        lengths=None if by_offsets else lengths,
        offsets=offsets if by_offsets else None,
        stride=batch_size,
    )


@each_backend
@given(features=jagged())
@settings(max_examples=15)
def test_random_batches(backend: str, features: KeyedJaggedTensor) -> None:
    for is_weighted in (False, True):
        tables = TABLES["shared_features"]()
        for config in tables:
            config.pooling = SUM if is_weighted else config.pooling
        oracle = standard(tables, is_weighted)
        assert_same(oracle, convert(copy.deepcopy(oracle), backend=backend), features)


@each_backend
@given(features=jagged())
@settings(max_examples=15)
def test_random_batches_through_the_index(backend: str, features: KeyedJaggedTensor) -> None:
    """Fed the rows that its index gave to the ids, the standard collection answers and learns the same."""
    tables = TABLES["shared_features"]()
    hashed = convert(standard(tables), hashing=HashConfig(dense_rows=0, rows=64), backend=backend)
    raw = KeyedJaggedTensor(
        features.keys(),
        features.values().to(torch.int64) * (2**58 + 1) - 2**62,
        features.weights_or_none(),
        lengths=features.lengths(),
        stride=features.stride(),
    )
    hashed(raw)  # gives out the rows
    for config in tables:
        config.num_embeddings = 64
    for one in tables:
        # Ids of one table have other rows than those of the next: one table at a time.
        ids, rows = hashed.hash_indexes[one.name].items()
        row_of = dict(zip(ids.tolist(), rows.tolist(), strict=True))
        oracle = standard([one])
        with torch.no_grad():
            oracle.embedding_bags[one.name].weight.copy_(hashed.embedding_bags[one.name].weight)
        alone = raw.permute([raw.keys().index(name) for name in one.feature_names])
        rows_of_batch = torch.tensor([row_of[i] for i in alone.values().tolist()], dtype=torch.int64)
        mapped = KeyedJaggedTensor(alone.keys(), rows_of_batch, lengths=alone.lengths(), stride=alone.stride())
        wanted = oracle(mapped)
        found = hashed(raw).to_dict()
        for name in one.feature_names:
            key = name if name in found else f"{name}@{one.name}"
            torch.testing.assert_close(found[key], wanted[name], rtol=1e-5, atol=1e-6)
        wanted.values().square().sum().backward()
        hashed.zero_grad()
        own = hashed(raw).to_dict()
        keys = [name if name in own else f"{name}@{one.name}" for name in one.feature_names]
        torch.cat([own[key] for key in keys], dim=1).square().sum().backward()
        torch.testing.assert_close(
            hashed.embedding_bags[one.name].weight.grad,
            oracle.embedding_bags[one.name].weight.grad,
            rtol=1e-5,
            atol=1e-6,
        )
