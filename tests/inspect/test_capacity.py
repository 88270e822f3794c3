"""Capacity advice: one test a reason code, and that the advice does what it says."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from recfx import HashConfig, HashEmbeddingBagCollection, HashEmbeddingBagConfig, HashIndex, TableFullError, convert
from recfx.errors import Diagnostic
from recfx.inspect.explain import explain
from recfx.inspect.report_data import HashingReport, TableReport
from tests.builders.collections import tables_named
from tests.builders.optimizers import attach


def table(rows: int = 10, **hashing: Any) -> HashEmbeddingBagCollection:
    """One frozen table with an index, in training mode: training it needs no optimizer."""
    config = HashEmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=rows, feature_names=["f"], hashing=HashConfig(**hashing)
    )
    return HashEmbeddingBagCollection([config]).requires_grad_(False)


def index_of(collection: HashEmbeddingBagCollection) -> HashIndex:
    index = collection.hash_indexes["t"]
    assert isinstance(index, HashIndex)
    return index


def see(collection: HashEmbeddingBagCollection, ids: Tensor) -> None:
    collection(KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([ids.numel()])))


def see_all(collection: HashEmbeddingBagCollection, batches: Iterator[Tensor]) -> None:
    for ids in batches:
        see(collection, ids)


def report_of(collection: HashEmbeddingBagCollection) -> TableReport:
    return explain(collection).collections[0].tables[0]


def hashing_of(collection: HashEmbeddingBagCollection) -> HashingReport:
    hashing = report_of(collection).hashing
    assert hashing is not None
    return hashing


def only_reason(collection: HashEmbeddingBagCollection) -> Diagnostic:
    (reason,) = report_of(collection).reasons
    assert reason.path == "embedding_bags.t"
    assert reason in explain(collection).reasons
    return reason


def test_index_nearly_full() -> None:
    collection = table(100)
    see_all(collection, iter(torch.arange(79).split(5)))
    assert report_of(collection).reasons == ()
    see(collection, torch.tensor([79]))
    reason = only_reason(collection)
    assert (reason.code, reason.severity) == ("index_nearly_full", "warning")
    assert "HashConfig(rows=200)" in reason.what_to_do


def test_the_advice_for_a_converted_model_is_followed() -> None:
    """Optimizers come afterwards, and rows move with their ids."""

    def build(rows: int | None = None) -> Any:
        raw = HashConfig.raw_ids(rows=rows, buckets=1)
        model = convert(tables_named("a", "b", rows=20), hashing={"a": raw, "b": HashConfig.raw_ids(buckets=1)})
        attach(model, torch.optim.SGD, lr=0.1)
        return model

    model = build()
    model(KeyedJaggedTensor(list("ab"), torch.arange(18), lengths=torch.tensor([18, 0])))
    (advice,) = (one.what_to_do for one in explain(model).reasons if one.code == "index_nearly_full")
    assert "HashConfig(rows=40)" in advice
    larger = build(40)
    larger.load_state_dict(model.state_dict())
    assert not [one for one in explain(larger).reasons if one.code == "index_nearly_full"]


def test_the_fullest_bucket_counts_not_the_mean() -> None:
    collection = table(10, buckets=2)
    index = index_of(collection)
    second = [value for value in range(40) if int(index.shared_rows(torch.tensor([value]))) >= 5]
    index.find_or_insert(torch.tensor(second[:5]))  # one bucket full, the other empty
    hashing = hashing_of(collection)
    assert (hashing.occupancy, hashing.worst_bucket, hashing.worst_bucket_occupancy) == (0.5, 1, 1.0)
    assert only_reason(collection).code == "index_nearly_full"


def test_a_table_that_has_stopped_training_is_not_ok() -> None:
    model = convert(nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[
        EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=4, feature_names=[name]) for name in "ab"
    ])}), hashing=HashConfig.raw_ids(buckets=1))  # fmt: skip

    def train(ids: Tensor, first: int) -> None:
        model["ebc"](KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([first, ids.numel() - first])))

    train(torch.arange(8), 4)
    assert explain(model).ok
    with pytest.raises(TableFullError):
        train(torch.arange(100, 112), 1)
    report = explain(model)
    assert not report.ok
    (reason,) = (one for one in report.reasons if one.severity == "error")
    assert (reason.code, reason.path) == ("table_full", "ebc.embedding_bags.b")
    assert "HashConfig(rows=20)" in reason.what_to_do
    train(torch.arange(8), 4)  # someone has left these ids out
    assert explain(model).ok


def test_shared_answers() -> None:
    collection = table(on_full="share")
    see(collection, torch.arange(20, 29))
    assert only_reason(collection).code == "index_nearly_full"
    see(collection, torch.arange(29, 33).repeat(2))
    reason = only_reason(collection)
    assert (reason.code, reason.severity) == ("shared_answers", "warning")
    for _ in range(100):
        see(collection, torch.arange(20, 29))
    assert only_reason(collection).severity == "info"  # less than 1 % by now


def test_a_table_that_evicts_is_meant_to_be_full() -> None:
    collection = table(on_full="evict")
    see(collection, torch.arange(10))
    for _ in range(20):
        see(collection, torch.arange(10))
    see(collection, torch.tensor([50]))
    assert report_of(collection).reasons == ()
    hashing = hashing_of(collection)
    assert (hashing.evict, hashing.occupancy) == ("lru", 1.0)


def test_eviction_churn() -> None:
    """Fifteen ids in turn through ten rows: each has just lost its row when it comes again."""
    collection = table(on_full="evict")
    for batch in range(30):
        see(collection, torch.tensor([batch % 15]))
    reason = only_reason(collection)
    assert (reason.code, reason.severity) == ("eviction_churn", "warning")
    assert "HashConfig(rows=20)" in reason.what_to_do
    assert "admit_after=2" in reason.what_to_do
    enough = table(20, on_full="evict")
    for batch in range(30):
        see(enough, torch.tensor([batch % 15]))
    assert report_of(enough).reasons == ()


def test_ids_that_are_evicted_get_advice_however_often_the_others_come() -> None:
    """Half of the ids that got a row lose it, but nearly all sightings are of those that stay."""
    collection = table(on_full="evict", evict="lfu")
    for _ in range(50):
        see(collection, torch.arange(5))
    for stranger in range(100, 109):
        see(collection, torch.tensor([stranger]))
    assert report_of(collection).reasons == ()  # 4 of 14
    for stranger in range(109, 115):
        see(collection, torch.tensor([stranger]))
    reason = only_reason(collection)
    assert (reason.code, reason.severity) == ("eviction_churn", "info")


def test_ids_that_expire_are_meant_to_lose_their_rows() -> None:
    expiring = table(on_full="evict", evict="ttl", ttl_batches=1)
    for batch in range(40):
        see(expiring, torch.tensor([batch]))
    assert hashing_of(expiring).counters["evicted"] == 38
    assert report_of(expiring).reasons == ()
    for batch in range(20):  # nothing is left for new ones
        see(expiring, torch.arange(10) + 100 * batch)
    reason = only_reason(expiring)
    assert reason.code == "eviction_churn"


def test_unseen_answers() -> None:
    collection = table()
    see(collection, torch.tensor([1, 2]))
    assert report_of(collection).reasons == ()
    see(collection.eval(), torch.tensor([1, 3, 4, 5]))
    reason = only_reason(collection)
    assert (reason.code, reason.severity) == ("unseen_answers", "info")
    assert reason.message.startswith("3 of 4 ")


def test_candidates_are_counted() -> None:
    collection = table(10, admit_after=3)
    for batch in range(5):
        see(collection, torch.tensor([2 * batch]))
        assert report_of(collection).reasons == ()
    see(collection, torch.tensor([100, 101, 102, 103]))
    assert report_of(collection).reasons == ()
    assert hashing_of(collection).candidates == 9


def test_explaining_changes_no_index() -> None:
    collection = table(20, on_full="evict", admit_after=2, buckets=2)
    for batch in range(20):
        see(collection, torch.arange(batch, batch + 8))
    see(collection.eval(), torch.arange(50, 60))
    index = index_of(collection)
    before = copy.deepcopy(dict(index.named_buffers()))
    explain(collection)
    for name, tensor in index.named_buffers():
        assert torch.equal(tensor, before[name]), name
