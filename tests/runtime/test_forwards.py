"""A forward that one collection refuses changes nothing in the others: training goes on as if it had never been."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

import recfx
from recfx import HashConfig
from recfx.collections.converted_collection import converted_collections, share_forwards
from recfx.errors import InputError, RecfxError, TableFullError
from recfx.runtime.find_ids import IndexSnapshot
from tests.builders.batches import bags
from tests.builders.collections import table
from tests.builders.optimizers import attach

LRU = HashConfig(dense_rows=0, on_full="evict", buckets=2)
KINDS = {
    "lru": LRU,
    "lfu": HashConfig(dense_rows=3, on_full="evict", evict="lfu", buckets=2),
    "admission": HashConfig(dense_rows=0, on_full="evict", admit_after=2, unseen="share", buckets=2),
    "share": HashConfig(dense_rows=0, on_full="share", buckets=2),
    "error": HashConfig(dense_rows=0, buckets=2),
}


class Batch(NamedTuple):
    features: KeyedJaggedTensor
    other_features: KeyedJaggedTensor


class Model(nn.Module):
    """``first`` is called ``times`` times, ``second`` in between; the last one decides about the batch."""

    def __init__(self, times: int = 1, rows: int = 60) -> None:
        super().__init__()
        self.first = EmbeddingBagCollection(
            [table("a", ["fa"], dim=4, rows=rows), table("b", ["fb"], dim=4, rows=rows)]
        )
        self.second = EmbeddingBagCollection([table("c", ["fc"], dim=4, rows=rows)])
        self.last = EmbeddingBagCollection([table("d", ["fd"], dim=4, rows=200), table("s", ["fs"], dim=4, rows=8)])
        self.times = times

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [self.first(batch.features).values()]
        parts.append(self.second(batch.features).values())
        for _ in range(self.times - 1):
            parts.append(self.first(batch.features).values())
        parts.append(self.last(batch.other_features).values())
        both = torch.cat(parts, 1)
        return (both.tanh() ** 2).mean(), both.detach()


def batch(number: int, most: int = 150, samples: int = 3) -> Batch:
    generator = torch.Generator().manual_seed(number)

    def ids(most: int) -> list[list[int]]:
        return torch.randint(0, most, (samples, 3), generator=generator).tolist()

    first = bags({"fa": ids(most), "fb": ids(most), "fc": ids(most)})
    return Batch(first, bags({"fd": ids(most), "fs": ids(8)}))


def missing(number: int) -> Batch:
    return Batch(batch(number).features, bags({"fd": [[1]] * 3}))


def out_of_range(number: int) -> Batch:
    return Batch(batch(number).features, bags({"fd": [[1]] * 3, "fs": [[8]] * 3}))


def wrong_dtype(number: int) -> Batch:
    features, second = batch(number)
    return Batch(features, KeyedJaggedTensor(second.keys(), second.values().double(), lengths=second.lengths()))


def too_many(number: int) -> Batch:
    return Batch(batch(number).features, bags({"fd": [list(range(1000, 1500))] * 3, "fs": [[1]] * 3}))


REFUSED: dict[str, Callable[[int], Batch]] = {
    make_batch.__name__: make_batch for make_batch in (missing, out_of_range, wrong_dtype, too_many)
}


def make(kind: str, optimizer: str = "adagrad", times: int = 1, sampled: bool = True, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    plain = Model(times, rows={"error": 200, "admission": 20}.get(kind, 60))
    attach(plain, optimizer)
    hashing = dict.fromkeys("abcd", KINDS[kind]) | {"d": KINDS["error"], "s": None}
    sample = (batch(0),) if sampled else None
    return recfx.convert(plain, sample, hashing=hashing, verify=False, **options)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """All that training changes, also in rows that no id has."""
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    for path, collection in converted_collections(model).items():
        for name, optimizer in collection.store.optimizers.items():
            values = optimizer.state.items()
            tensors |= {f"{path}.{name}.{key}": value.clone() for key, value in values if torch.is_tensor(value)}
        for name in collection.hash_indexes:
            index = collection.index(name)
            tensors[f"{path}.{name}.uninitialized"] = index.uninitialized.clone()
            ids, rows = index.items()
            assert torch.equal(index.find(ids), rows)
    return tensors


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def step(model: nn.Module, passed: Batch) -> torch.Tensor:
    loss, output = model(passed)
    loss.backward()
    return output


def refuse(model: nn.Module, passed: Batch) -> None:
    before = state(model)
    with pytest.raises(RecfxError):
        model(passed)
    assert_equal(state(model), before)


@pytest.mark.parametrize("whole_graph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_goes_on_as_if_the_batch_had_never_been(kind: str, whole_graph: bool) -> None:
    model, reference = (make(kind, whole_graph=whole_graph) for _ in range(2))
    most = 30 if kind == "admission" else 150
    for number in range(10):
        if number in (0, 5, 6, 9):
            for which, wrong in enumerate(REFUSED.values()):
                features, _ = batch(100 + 10 * number + which, most)
                refuse(model, wrong(0)._replace(features=features))
        assert torch.equal(step(model, batch(number, most)), step(reference, batch(number, most)))
        assert_equal(state(model), state(reference))
    evicted = [model.get_submodule("first").index("a").counters["evicted"], KINDS[kind].on_full == "evict"]
    assert bool(evicted[0]) == evicted[1]


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_the_state_of_optimizers_comes_back(optimizer: str) -> None:
    model = make("lru", optimizer)
    for number in range(9):
        step(model, batch(number))
    for number in range(3):
        refuse(model, missing(100 + number))
    assert model.get_submodule("first").index("a").counters["evicted"] > 0


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_collections_that_a_forward_calls_twice(backend: str, sampled: bool) -> None:
    """How often is known from the sample; without one, after the first backward."""
    model = make("lru", times=2, backend=backend, sampled=sampled)
    for number in range(4):
        if sampled or number > 0:
            refuse(model, missing(100 + number))
        step(model, batch(number))


def test_what_a_forward_calls_is_learned_from_the_last_one() -> None:
    """The first forward calls a collection once, later ones twice."""
    model = make("lru", sampled=False)
    step(model, batch(0))
    model.times = 2
    step(model, batch(1))
    refuse(model, missing(100))


@pytest.mark.parametrize("sampled", [True, False])
def test_batches_that_wait_for_their_backward_stay(sampled: bool) -> None:
    """Losses of several forwards are accumulated; steps are skipped; one forward fails in the user's own code."""
    model, reference = make("lru", sampled=sampled), make("lru", sampled=sampled)
    for number in range(0, 9, 3):
        losses = {}
        for module in (model, reference):
            losses[module] = module(batch(number))[0]
            if module is model:
                refuse(model, missing(100 + number))
            losses[module] = losses[module] + module(batch(number + 1))[0]
            if module is model:
                refuse(model, out_of_range(200 + number))
            module(batch(number + 2))  # skipped
            if module is model:
                refuse(model, missing(300 + number))
            losses[module].backward()
        assert_equal(state(model), state(reference))


def test_a_tower_that_is_called_alone_stays() -> None:
    model = make("lru")
    for _ in range(3):
        kept = model.first(batch(1).features).values().sum()
        model.first(batch(2).features)
    before = state(model)
    model.second(batch(1).features)
    with pytest.raises(InputError):
        model.last(missing(3).other_features)
    after = state(model)
    assert not torch.equal(after["first.hash_indexes.a.counts"], before["first.hash_indexes.a.counts"])
    kept.backward()


def test_eval_refuses_without_changing_what_was_trained() -> None:
    model = make("lru")
    loss, _ = model(batch(1))
    before = state(model)
    model.eval()
    with pytest.raises(RecfxError):
        model(missing(2))
    assert_equal(state(model), before)
    loss.backward()


def test_the_backward_of_what_was_undone() -> None:
    model = make("lru")
    step(model, batch(0))
    output = model.first(batch(1).features).values().sum()
    with pytest.raises(InputError):
        model.last(missing(1).other_features)
    before = state(model)
    with pytest.raises(InputError) as caught:
        output.backward()
    assert (caught.value.reason, caught.value.module_path) == ("backward_after_refusal", "first")
    assert_equal(state(model), before)


def test_nothing_is_undone_after_a_backward() -> None:
    model = make("lru")
    output = model.first(batch(1).features).values().sum()
    output.backward()
    before = state(model)
    with pytest.raises(InputError):
        model.last(missing(1).other_features)
    assert_equal(state(model), before)
    assert int(before["first.hash_indexes.a.counts"][0]) == 1


def test_no_forward_is_under_way_between_calls() -> None:
    model = make("lru")
    stores = share_forwards(model)
    for take in (batch, missing, batch):
        with contextlib.suppress(InputError):
            model(take(1))
        assert [store.forwards.now() for store in stores] == [None] * len(stores)


def test_rows_that_were_found_in_between_are_not_used() -> None:
    """By a pipeline that finds rows ahead, and by copies of the index on a device."""
    model = make("share")
    index = model.get_submodule("first").index("a")
    model.first(batch(1).features)
    snapshot, version = IndexSnapshot({"a": index}), index.map_version
    with pytest.raises(InputError):
        model.last(missing(1).other_features)
    assert not snapshot.holds
    model.first(batch(1).features)
    assert index.map_version[2] == version[2]
    assert index.map_version != version


def test_copies_undo_what_is_theirs() -> None:
    model = make("lru")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        model(batch(0))
        before = state(model)
        step(copied, batch(0))
        refuse(copied, missing(1))
        assert_equal(state(model), before)


def test_an_index_that_was_changed_meanwhile_stays(recwarn: pytest.WarningsRecorder) -> None:
    model = make("lru")
    model.first(batch(1).features)
    index = model.first.index("a")
    index.erase(index.items()[0][:1])
    before = state(model)
    with pytest.warns(UserWarning, match="table 'a' was|stays counted in table 'a'"), pytest.raises(InputError):
        model.last(missing(1).other_features)
    assert_equal(state(model), before)


def test_one_collection_alone_notes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recfx.kernels.index.hash_index.find_or_insert_undoably", None)
    plain = Model().first
    attach(plain, "adagrad")
    converted = recfx.convert(plain, hashing=LRU)
    step_ids = bags({"fa": [[1, 2]], "fb": [[3]]})
    converted(step_ids).values().sum().backward()
    with pytest.raises(TypeError):
        make("lru")(batch(0))


def test_a_batch_of_another_thread_in_between_stays() -> None:
    """An id that the refused batch has evicted may have come back: it must not get its old row as well."""
    torch.manual_seed(0)
    plain = Model(rows=4)
    attach(plain, "adagrad")
    hashing = dict.fromkeys("abcd", HashConfig(dense_rows=0, on_full="evict")) | {"s": None}
    model = recfx.convert(plain, hashing=hashing, verify=False)
    first, index = model.get_submodule("first"), model.get_submodule("first").index("a")

    def train(number: int) -> None:
        first(bags({"fa": [[number]], "fb": [[number]]})).values().sum().backward()

    for number in range(4):
        train(number)
    first.batches_in_flight = 0
    first(bags({"fa": [[5]], "fb": [[5]]}))
    thread = threading.Thread(target=train, args=(0,))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    before, forwards = state(model), first.store.in_flight.turn
    with pytest.warns(UserWarning, match="another thread"), pytest.raises(InputError):
        model.last(missing(1).other_features)
    assert_equal(state(model), before)
    assert first.store.in_flight.turn == forwards
    assert sorted(index.items()[0].tolist()) == [0, 2, 3, 5]


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([table("a", ["fa"], dim=4, rows=40)])

    def forward(self, query: KeyedJaggedTensor, answer: KeyedJaggedTensor) -> torch.Tensor:
        return (self.ebc(query).values() * self.ebc(answer).values()).sum()


def test_the_only_collection_which_a_forward_calls_twice() -> None:
    torch.manual_seed(0)
    plain = Siamese()
    attach(plain, "adagrad")
    query = bags({"fa": [[1, 2, 3]]})
    model = recfx.convert(plain, (query, query), hashing=LRU, verify=False)
    model(query, bags({"fa": [[4, 5]]})).backward()
    before = state(model)
    with pytest.raises(InputError):
        model(bags({"fa": [[7, 8, 9]]}), bags({"unknown": [[1]]}))
    assert_equal(state(model), before)


def test_batches_of_the_pipeline() -> None:
    def source(model: nn.Module, refused: bool) -> Iterator[torch.Tensor]:
        planned = [batch(number) for number in range(8)]
        if refused:
            planned[3:3], planned[6:6] = [missing(100), out_of_range(101)], [too_many(102)]
        pipeline = recfx.TrainPipeline(model, torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1), "cpu")
        batches = iter(planned)
        while True:
            try:
                yield pipeline.progress(batches)
            except StopIteration:
                return
            except RecfxError as error:
                refusals.append(error.reason)

    model, reference = make("lru"), make("lru")
    refusals: list[str] = []
    for left, right in zip(source(model, True), source(reference, False), strict=True):
        assert torch.equal(left, right)
    assert_equal(state(model), state(reference))
    assert refusals == ["missing_feature", "id_out_of_range", "table_full"]


def test_a_bucket_that_is_full_in_a_later_collection() -> None:
    model = make("error")
    step(model, batch(0))
    with pytest.raises(TableFullError):
        model(too_many(1))
    refuse(model, too_many(1))
