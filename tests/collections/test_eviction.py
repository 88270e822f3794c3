"""Tables that evict, trained: every id has its own weights and optimizer state, for as long as it has a row."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recfx
from recfx.errors import InputError, TableFullError
from recfx.hashing import HashConfig
from tests.builders.collections import table
from tests.builders.optimizers import OPTIMIZERS, attach
from tests.support.lifecycle import BATCH, Batch, Pair, pair
from tests.support.refusals import refused

LRU = HashConfig(dense_rows=0, on_full="evict")
LFU = HashConfig(dense_rows=0, on_full="evict", evict="lfu", seed=3)
TTL = HashConfig(dense_rows=0, on_full="evict", evict="ttl", ttl_batches=1)


@pytest.mark.parametrize("rule", [LRU, TTL])
@pytest.mark.parametrize("attach", ["before", "after"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_follows_the_ids(optimizer: str, attach: str, rule: HashConfig) -> None:
    both = pair({"t1": rule, "t2": LFU}, optimizer, attach=attach)
    for step in range(25):
        both.step()
        if step % 8 == 7:
            both.evaluate(both.batch(universe=60))
    assert min(oracle.ids.counters["evicted"] for oracle in both.oracle.values()) > 20


@pytest.mark.parametrize(("mean", "is_weighted"), [(True, False), (False, True)])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_training_follows_the_ids_in_means_and_weighted_sums(optimizer: str, mean: bool, is_weighted: bool) -> None:
    both = pair({"t1": LFU, "t2": LRU}, optimizer, mean=mean, is_weighted=is_weighted)
    for _ in range(15):
        both.step()
    both.evaluate(both.batch(universe=60))
    assert both.total("evicted") > 20


def test_evicting_beside_tables_that_do_not() -> None:
    both = pair({"t1": LRU, "t2": HashConfig(dense_rows=0, on_full="share")}, "adagrad")
    for _ in range(15):
        both.step()
    assert both.oracle["t1"].ids.counters["evicted"] > 10
    assert both.oracle["t2"].ids.counters["shared_answers"] > 10


def test_training_goes_on_after_save_and_load() -> None:
    both = pair({"t1": LRU, "t2": LFU}, "adagrad")
    for _ in range(8):
        both.step()
    state = copy.deepcopy(both.model.state_dict())
    other = pair({"t1": LRU, "t2": LFU}, "adagrad", attach="after")
    for _ in range(3):
        other.step()
    other.model.load_state_dict(state)
    for name, optimizer in other.model.fused_optimizers().items():
        for key, value in both.model.fused_optimizers()[name].state.items():
            optimizer.state[key].copy_(value)
    other.oracle = both.oracle
    before = other.total("evicted")
    for _ in range(8):
        other.step()
    assert other.total("evicted") > before > 0


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize(
    "config", [HashConfig(dense_rows=0, unseen="share"), LRU, HashConfig(dense_rows=0, admit_after=2)]
)
def test_a_checkpoint_loaded_in_place_is_noticed_by_the_model(config: HashConfig, is_training: bool) -> None:
    """As torch.distributed.checkpoint does it: into the tensors of ``state_dict()``, behind the model's back."""
    models = []
    for ids in ((1, 2, 2, 3, 3), (7, 7, 8, 8, 1, 1)):
        plain = EmbeddingBagCollection(tables=[table("t", ["f"], dim=4, rows=10)])
        attach(plain, torch.optim.SGD)
        models.append(recfx.convert(plain, hashing=config))
        run(models[-1], *ids)
        run(models[-1].eval(), *ids)
    saved, written = models
    state = written.state_dict()
    for key, value in saved.state_dict().items():
        state[key].copy_(value)
    for model in models:
        model.train(is_training)
    assert torch.equal(run(written, 3, 7, 1, 2), run(saved, 3, 7, 1, 2))
    assert torch.equal(run(written, 7, 8, 2), run(saved, 7, 8, 2))
    for key, value in saved.state_dict().items():
        assert torch.equal(written.state_dict()[key], value), key


def test_a_row_that_is_taken_starts_at_the_optimizers_own_beginning() -> None:
    plain = EmbeddingBagCollection(tables=[table("t", ["f"], dim=4, rows=4)])
    attach(plain, torch.optim.Adagrad, initial_accumulator_value=0.5)
    model = recfx.convert(plain, hashing=LRU)
    run(model, 1, 2, 3, 4).sum().backward()
    run(model, 1, 2, 3).sum().backward()
    run(model, 5)
    state = model.fused_optimizers()["t"].state["sum"]
    rows = model.index("t").find(torch.tensor([1, 5]))
    assert state[rows, 0].tolist() == [2.5, 0.5]


# Batches in flight


def small(rows: int = 4, optimizer: str = "sgd", **config: Any) -> recfx.HashEmbeddingBagCollection:
    plain = EmbeddingBagCollection(tables=[table("t", ["f"], dim=4, rows=rows)])
    model = recfx.convert(plain, hashing=HashConfig(dense_rows=0, on_full="evict", **config))
    attach(model, optimizer)
    assert isinstance(model, recfx.HashEmbeddingBagCollection)
    return model


def run(model: torch.nn.Module, *ids: int) -> torch.Tensor:
    lengths = torch.tensor([len(ids)])
    return model(features_of(ids, lengths)).values()


def features_of(ids: tuple[int, ...], lengths: torch.Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor(ids, dtype=torch.int64), lengths=lengths)


def known_ids(model: recfx.HashEmbeddingBagCollection) -> set[int]:
    return set(model.index("t").items()[0].tolist())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_two_forwards_before_the_first_backward(optimizer: str) -> None:
    """As a pipeline does; the rows of both batches stay until their own backward."""
    both: Pair = pair({"t1": LRU, "t2": LFU}, optimizer)
    waiting = both.forward(both.batch(longest=1))
    for _ in range(12):
        following = both.forward(both.batch(longest=1), batches_in_flight=1)
        both.backward(waiting)
        waiting = following
    both.backward(waiting)
    both.step()
    assert both.total("evicted") > 0


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_batch_keeps_its_rows_until_its_backward_or_for_so_many_later_forwards(depth: int) -> None:
    """Whether its output is still there makes no difference."""
    for keep_outputs in (True, False):
        model = small(rows=4 + depth)
        model.batches_in_flight = depth
        kept = [run(model, 1, 2)]
        for forward in range(depth - 1):
            run(model, 3 + forward).sum().backward()
        if not keep_outputs:
            kept.clear()
            gc.collect()
        if depth:
            with pytest.raises(TableFullError):
                run(model, *range(10, 13 + depth))
            with torch.no_grad():
                run(model, 3)  # the last forward in which they keep their ids
        run(model, *range(10, 14 + depth)).sum().backward()
        assert known_ids(model) == set(range(10, 14 + depth))
        for output in kept:
            before = model.weight("t").detach().clone()
            with refused("backward_after_eviction", match=r"tables \['t'\]", error=InputError):
                output.sum().backward()
            assert torch.equal(model.weight("t"), before)


def test_a_late_backward_trains_if_no_id_was_evicted() -> None:
    late, in_time = small(rows=8), small(rows=8)
    torch.stack([run(late, number) for number in range(8)]).sum().backward()
    for number in range(8):
        run(in_time, number).sum().backward()
    assert torch.equal(late.weight("t"), in_time.weight("t"))


def test_forwards_that_no_backward_follows_keep_no_rows() -> None:
    model = small()
    run(model, 1, 2).sum().backward()
    for training in (False, True):
        model.train(training)
        with torch.no_grad():
            run(model, 1, 2)
    run(model, 5, 6, 7, 8)
    assert known_ids(model) == {5, 6, 7, 8}


def test_a_forward_in_eval_mode_with_gradients_on_keeps_its_rows_like_any_other() -> None:
    """An evaluation without no_grad keeps those of its last two batches."""
    model = small(rows=6)
    run(model, 1, 2, 3, 4, 5, 6).sum().backward()
    model.eval()
    evaluated = [run(model, number) for number in range(1, 7)]
    model.train()
    run(model, 11, 12, 13, 14).sum().backward()
    assert known_ids(model) == {5, 6, 11, 12, 13, 14}
    before = model.weight("t").detach().clone()
    with pytest.raises(InputError, match="backward_after_eviction"):
        evaluated[0].sum().backward()
    assert torch.equal(model.weight("t"), before)
    evaluated[5].sum().backward()
    assert not torch.equal(model.weight("t"), before)


class SixCalls(torch.nn.Module):
    def __init__(self, ebc: torch.nn.Module) -> None:
        super().__init__()
        self.ebc = ebc

    def forward(self, *batches: KeyedJaggedTensor) -> torch.Tensor:
        return torch.stack([self.ebc(batch).values().sum() for batch in batches]).sum()


def test_a_model_that_calls_a_collection_often_keeps_the_rows_of_two_later_steps() -> None:
    plain = EmbeddingBagCollection(tables=[table("t", ["f"], dim=4, rows=24)])
    attach(plain, "sgd")
    one_bag = torch.ones(1, dtype=torch.int64)
    batches = [[features_of((100 * step + call,), one_bag) for call in range(6)] for step in range(12)]
    model: Any = recfx.convert(SixCalls(plain), sample=tuple(batches[0]), hashing=LRU)
    assert model.ebc.batches_in_flight == 17
    for step in batches:
        model(*step).backward()
    assert model.ebc.index("t").counters["evicted"] == 48


@pytest.mark.parametrize("number", [-1, 1.5, "2", None, True])
def test_batches_in_flight_is_a_number_of_forwards(number: Any) -> None:
    model = small()
    with refused("invalid_argument", match="batches_in_flight"):
        model.batches_in_flight = number
    assert model.batches_in_flight == 2
    model.batches_in_flight = 5
    assert copy.deepcopy(model).batches_in_flight == 5


def test_an_error_that_is_kept_protects_nothing() -> None:
    model = small()
    with pytest.raises(TableFullError) as kept:
        run(model, *range(10))
    for step in range(5):
        run(model, 2 * step, 2 * step + 1).sum().backward()
    assert kept.value.reason == "table_full"
    assert known_ids(model) == {6, 7, 8, 9}


def test_a_second_backward_does_not_train_the_next_owner() -> None:
    model = small()
    output = run(model, 1, 2).sum()
    output.backward(retain_graph=True)
    output.backward(retain_graph=True)
    run(model, 3, 4, 5, 6).sum().backward()
    before = model.weight("t").detach().clone()
    with refused("backward_after_eviction", error=InputError):
        output.backward()
    assert torch.equal(model.weight("t"), before)


# Activation checkpointing


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("config", [{}, {"admit_after": 2}])
def test_activation_checkpointing_is_refused(config: dict[str, Any], use_reentrant: bool) -> None:
    model, scale = small(**config), torch.ones(1, requires_grad=True)
    output = checkpoint(lambda s: run(model, 1, 2) * s, scale, use_reentrant=use_reentrant)
    before = model.index("t").counters
    with refused("activation_checkpointing", error=InputError):
        output.sum().backward()
    assert model.index("t").counters == before


@pytest.mark.parametrize("config", [LRU, HashConfig(dense_rows=0, on_full="evict", admit_after=2, unseen="share")])
def test_compiled_models_evict_in_place(config: HashConfig) -> None:
    """Nothing is copied that is as large as the table."""
    torch._dynamo.reset()
    rows, dim = 3000, 4
    plain = EmbeddingBagCollection(tables=[table("t", ["f"], dim=dim, rows=rows)])
    attach(plain, torch.optim.Adagrad)
    model = recfx.convert(plain, hashing=config)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    for model_or_twin in (compiled, twin):
        run(model_or_twin, *(2 * tuple(range(-rows, 0)))).sum().backward()
    for step in range(8):
        ids = tuple(range(100 * step, 100 * step + 150)) * 2
        outputs = []
        for of_two in (compiled, twin):
            pieces = [tensor.data_ptr() for tensor in model.state_dict().values()]
            with torch.profiler.profile(profile_memory=True) as profile:
                outputs.append(run(of_two, *ids))
                outputs[-1].sum().backward()
            assert [tensor.data_ptr() for tensor in model.state_dict().values()] == pieces
            largest = max(event.self_cpu_memory_usage for event in profile.events())
            assert 0 < largest < 6 * rows, "the rows' ids take 8 bytes, their weights 16, the slots more"
        torch.testing.assert_close(*outputs)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[key])
    assert model.index("t").counters["evicted"] > 700


# What is refused, and what stays


@pytest.mark.parametrize("is_trained", [False, True])
def test_conversion_with_a_sample(is_trained: bool) -> None:
    """The optimizer may come later."""
    plain = EmbeddingBagCollection(tables=[table("t", ["f"], dim=4, rows=8)])
    original = copy.deepcopy(plain)
    for collection in (plain, original) if is_trained else ():
        attach(collection, torch.optim.SGD)
    sample = features_of((1, 2, 2, 3), torch.tensor([3, 1]))
    model = recfx.convert(plain, sample=(sample,), hashing=LRU)
    report = recfx.verify(original, model, (sample,))
    assert report.ok, report
    assert len(model.index("t")) == 0


def test_a_full_table_leaves_the_whole_collection_as_it_was() -> None:
    both = pair({"t1": LRU, "t2": LFU}, "adam")
    for _ in range(6):
        both.step()
    before = copy.deepcopy(both.model.state_dict())
    states = {name: copy.deepcopy(optimizer.state) for name, optimizer in both.model.fused_optimizers().items()}
    new = iter(range(10**6, 2 * 10**6))
    for t1, t2 in ((2, 20), (30, 2)):
        bags = {"t1": [[next(new) for _ in range(t1)], *[[] for _ in range(2 * BATCH - 1)]]}
        bags["t2"] = [[next(new) for _ in range(t2)], *[[] for _ in range(BATCH - 1)]]
        too_large = Batch(bags, {"t1": [1.0] * t1, "t2": [1.0] * t2}, False)
        with pytest.raises(TableFullError, match=f"table 't{2 if t2 == 20 else 1}' is full"):
            both.model(too_large.features)
        for key, value in both.model.state_dict().items():
            assert torch.equal(value, before[key]), key
        for name, state in states.items():
            for key, value in both.model.fused_optimizers()[name].state.items():
                assert torch.equal(value, state[key]), (name, key)
    for _ in range(6):
        both.step()


def test_nothing_expires_in_a_file_or_in_eval_mode(tmp_path: Path) -> None:
    both = pair({"t1": TTL, "t2": LFU}, "sgd")
    both.step()
    served, asked = both.batch(), both.batch()
    both.step(served)
    known = both.model.index("t1").items()[0]
    both.model.eval()
    recfx.export(both.model, tmp_path / "model", (served.features,))
    with torch.no_grad():  # otherwise rows would be kept for a backward
        expected = both.model(served.features).values()
        for _ in range(3):
            both.model(asked.features)
    assert torch.equal(both.model.index("t1").items()[0], known)
    both.model.train()
    for _ in range(3):
        both.step(Batch({"t1": [[]] * 6, "t2": [[]] * 3}, {"t1": [], "t2": []}, False))
    assert len(both.model.index("t1")) == 0
    both.model.eval()
    torch.testing.assert_close(recfx.load(tmp_path / "model")(served.features).values(), expected)
    assert not torch.equal(both.model(served.features).values(), expected)
