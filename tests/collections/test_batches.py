"""Every kind of batch: converted, a collection answers and learns as the standard, unsharded one does."""

import copy

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.conversion.convert import convert
from recfx.hashing import HashConfig
from tests.builders.batches import batch
from tests.collections.as_standard import SUM, TABLES, assert_same, each_backend, each_hashing, standard


@each_backend
@pytest.mark.parametrize("tables", ["sum_and_mean", "several_features", "shared_features"])
@pytest.mark.parametrize(
    "keys",
    [("f3", "f1", "f2"), ("f1", "other", "f2", "f3"), ("other", "f3", "f2", "more", "f1")],
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
    expected = oracle(batch(1))
    assert pooled.keys() == expected.keys()
    assert pooled.values().shape == (0, expected.values().shape[1])
    assert pooled.values().dtype == torch.float32
    pooled.values().sum().backward()
    for weight in converted.parameters():
        assert weight.grad is None or not weight.grad.any()


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
