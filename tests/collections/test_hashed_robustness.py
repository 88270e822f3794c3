"""Hashed collections and everything around them that can go wrong: said clearly, with nothing half changed."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import recfx
from recfx import HashConfig, HashEmbeddingBagCollection
from recfx.errors import IdRangeError, InputError
from tests.builders.batches import bags
from tests.builders.collections import table
from tests.builders.optimizers import attach
from tests.support.refusals import refused

EVICT = HashConfig(dense_rows=0, on_full="evict", buckets=1)


def collection(tables: int = 1, rows: int = 4, **config: object) -> EmbeddingBagCollection:
    configs = [table(f"t{number}", [f"f{number}"], dim=4, rows=rows, **config) for number in range(tables)]
    return EmbeddingBagCollection(configs)


def batch(*ids: list[int]) -> KeyedJaggedTensor:
    """One sample; one list of ids a table."""
    return bags({f"f{number}": [ids_of_feature] for number, ids_of_feature in enumerate(ids)})


def evicting(**config: object) -> HashEmbeddingBagCollection:
    plain = collection(**config)  # type: ignore[arg-type]
    attach(plain, torch.optim.SGD, lr=1.0)
    converted = recfx.convert(plain, hashing=EVICT)
    assert isinstance(converted, HashEmbeddingBagCollection)
    return converted


@pytest.mark.parametrize("hashing", [HashConfig(dense_rows=0), HashConfig(dense_rows=0, admit_after=2, unseen="share")])
@pytest.mark.parametrize("backend", ["auto", "fbgemm", "reference"])
@pytest.mark.parametrize("wrong", [8, 10**9, -1, -5])
def test_ids_of_a_static_table_beside_an_index_are_checked(hashing: HashConfig, backend: str, wrong: int) -> None:
    hashings = {"t0": hashing, "t1": None}
    converted = recfx.convert(collection(2, rows=8), hashing=hashings, backend=backend)
    for training in (True, False):
        converted.train(training)
        with pytest.raises(IdRangeError, match="table 't1', whose rows are 0 to 7"):
            converted(batch([10**12], [wrong]))
    assert len(converted.index("t0")) == 0


def test_trained_rows_of_an_init_fn_are_filled_again_when_ids_get_them() -> None:
    plain = collection(init_fn=partial(nn.init.constant_, val=0.5))
    with torch.no_grad():
        plain.embedding_bags["t0"].weight.fill_(7.0)
    converted = recfx.convert(plain, hashing=HashConfig(dense_rows=0))
    assert converted(batch([123])).values().unique().tolist() == [0.5]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_backward_after_erase_says_so(fused: bool, training: bool) -> None:
    plain = collection()
    if fused:
        attach(plain, torch.optim.SGD, lr=1.0)
    converted = recfx.convert(plain, hashing=HashConfig(dense_rows=0))
    converted(batch([1, 2, 3]))
    output = converted.train(training)(batch([1, 2])).values().sum()
    converted.index("t0").erase(torch.tensor([99]))  # has no row: nothing is taken away
    output.backward(retain_graph=True)
    converted.index("t0").erase(torch.tensor([1]))
    before, weight = converted.weight("t0").detach().clone(), converted.weight("t0")
    weight.grad = None
    with refused("backward_after_removal", error=InputError):
        output.backward()
    assert torch.equal(weight, before)
    assert weight.grad is None


def test_a_backward_after_an_insert_that_evicts_says_so() -> None:
    converted = evicting()
    output = converted(batch([1, 2, 3, 4])).values().sum()
    converted.index("t0").insert(torch.tensor([50]))
    before = converted.weight("t0").clone()
    with refused("backward_after_removal", error=InputError):
        output.backward()
    assert torch.equal(converted.weight("t0"), before)


def test_a_batch_in_a_backward_must_not_bring_new_ids() -> None:
    converted = recfx.convert(collection(), hashing=HashConfig(dense_rows=0))
    converted(batch([1, 2]))
    trigger = torch.zeros(1, requires_grad=True)
    doubled = trigger * 2
    doubled.register_hook(lambda gradient: converted(batch([100])).values().sum().detach() * gradient)
    with refused("replayed_ids_absent", error=InputError):
        doubled.sum().backward()


def test_a_copy_does_not_let_go_of_a_lock_that_is_held() -> None:
    index = recfx.HashIndex(10)
    index.find_or_insert(torch.tensor([5]))
    index.lock.fill_(1)  # a reader is inside
    other = copy.copy(index)
    assert index.lock.item() == 1
    assert other.find(torch.tensor([5])).tolist() == [0]
    index.lock.zero_()


def test_weights_of_ids_get_float32_gradients_whatever_the_default_is() -> None:
    plain = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t0", num_embeddings=4, embedding_dim=4, feature_names=["f0"])], is_weighted=True
    )
    converted = recfx.convert(plain, hashing=HashConfig(dense_rows=0))
    converted(KeyedJaggedTensor(["f0"], torch.tensor([1]), torch.ones(1), lengths=torch.tensor([1])))
    weights = torch.ones(2, dtype=torch.float32, requires_grad=True)
    features = KeyedJaggedTensor(["f0"], torch.tensor([1, 99]), weights, lengths=torch.tensor([2]))
    torch.set_default_dtype(torch.float64)
    try:
        converted.eval()(features).values().sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert weights.grad is not None
    assert weights.grad[1] == 0
