"""A state with fewer rows in a bigger table: ids keep their weights and their optimizer's state, wherever they go."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

import recfx
from tests.checkpoint.training import KINDS, OnePart, OneSequence, Training, assert_same, batch
from tests.support.refusals import refused

BIGGER: dict[str, dict[str, Any]] = {
    "same_buckets": {"rows": 333},
    "more_buckets": {"rows": 500, "hashing": recfx.HashConfig(dense_rows=0, buckets=11)},
    "one_bucket": {"rows": 101, "hashing": recfx.HashConfig(dense_rows=0, buckets=1)},
}


def source_of(kind: str, model_class: type[nn.Module] = OnePart) -> Training:
    training = Training.build(kind, rows=100, model_class=model_class)
    training.steps(0, 4)
    assert 20 < len(training.model.first.index("a")) < 90
    return training


def by_id(training: Training, value: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    rows = training.model.first.index("a").find(ids)
    assert bool((rows >= 0).all())
    return value.detach()[rows]


def assert_by_id(source: Training, target: Training, initial: torch.Tensor, start: float) -> None:
    """Same weights and state for every id; rows without an id as in a new table."""
    ids, _ = source.model.first.index("a").items()
    known_ids, rows = target.model.first.index("a").items()
    assert sorted(known_ids.tolist()) == sorted(ids.tolist())
    weights = [training.model.first.weight("a") for training in (source, target)]
    assert torch.equal(by_id(source, weights[0], ids), by_id(target, weights[1], ids))
    others = torch.ones(initial.shape[0], dtype=torch.bool)
    others[rows] = False
    assert torch.equal(weights[1][others], initial[others])
    states = [training.model.first.fused_optimizers()["a"].state for training in (source, target)]
    for name, value in states[0].items():
        if value.dim() > 0:
            assert torch.equal(by_id(source, value, ids), by_id(target, states[1][name], ids)), name
            assert bool((states[1][name][others] == start).all()), name


def assert_trains_alike(source: Training, target: Training) -> None:
    for number in range(1, 4):  # ids that both know: new ones start differently in tables of different sizes
        left, right = source.model(batch(number)), target.model(batch(number))
        assert torch.equal(left, right)
        for one in (left, right):
            one.square().sum().backward()


@pytest.mark.parametrize("shape", BIGGER)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_class", [OnePart, OneSequence])
def test_load_checkpoint(tmp_path: Path, kind: str, shape: str, model_class: type[nn.Module]) -> None:
    source = source_of(kind, model_class)
    source.save(tmp_path)
    target = Training.build(kind, seed=4, model_class=model_class, **BIGGER[shape])
    target.steps(8, 10)
    initial = target.model.first.weight("a").detach().clone()
    target.load(tmp_path)
    assert_by_id(source, target, initial, KINDS[kind][1].get("initial_accumulator_value", 0.0))
    assert_trains_alike(source, target)


@pytest.mark.parametrize("shape", BIGGER)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_class", [OnePart, OneSequence])
def test_load_state_dict_of_model_and_fused_optimizer(kind: str, shape: str, model_class: type[nn.Module]) -> None:
    source = source_of(kind, model_class)
    target = Training.build(kind, seed=4, model_class=model_class, **BIGGER[shape])
    target.steps(8, 10)
    initial = target.model.first.weight("a").detach().clone()
    target.model.load_state_dict(copy.deepcopy(source.model.state_dict()))
    state = copy.deepcopy(source.model.first.fused_optimizer.state_dict())
    target.model.first.fused_optimizer.load_state_dict(state)
    assert_by_id(source, target, initial, KINDS[kind][1].get("initial_accumulator_value", 0.0))


def test_fused_state_alone_does_not_say_where_its_rows_are() -> None:
    source = source_of("adagrad")
    target = Training.build(seed=4, model_class=OnePart, rows=333)
    state = copy.deepcopy(source.model.first.fused_optimizer.state_dict())
    target.steps(0, 1)

    def assert_refused() -> None:
        before = target.everything()
        with refused("rows_mismatch", match="load the model's state", error=recfx.CheckpointError):
            target.model.first.fused_optimizer.load_state_dict(state)
        assert_same(target.everything(), before)

    assert_refused()
    target.model.load_state_dict(copy.deepcopy(source.model.state_dict()))
    target.model.eval()(batch(0))
    target.model.first.fused_optimizer.load_state_dict(state)
    target.model.train()(batch(0))  # training may give the rows to others
    assert_refused()


@pytest.mark.parametrize("load", ["state_dict", "checkpoint"])
def test_a_bucket_that_is_too_small_changes_nothing(tmp_path: Path, load: str) -> None:
    source = source_of("adam")
    source.save(tmp_path)
    target = Training.build(
        "adam", rows=101, seed=4, hashing=recfx.HashConfig(dense_rows=0, buckets=100), model_class=OnePart
    )
    before = target.everything()
    actions: dict[str, Callable[[], object]] = {
        "state_dict": lambda: target.model.load_state_dict(source.model.state_dict()),
        "checkpoint": lambda: target.load(tmp_path),
    }
    with refused("bucket_too_small", "a", error=recfx.CheckpointError):
        actions[load]()
    assert_same(target.everything(), before)


def test_a_state_without_an_index_fills_the_first_rows(tmp_path: Path) -> None:
    plain = OnePart(30)
    recfx.save_checkpoint(plain, tmp_path)
    model = recfx.convert(OnePart(30), hashing=recfx.HashConfig(rows=90))
    model(batch(0))
    before = copy.deepcopy(dict(model.state_dict()))
    with refused("checkpoint_mismatch", error=recfx.CheckpointError):
        recfx.load_checkpoint(model, tmp_path)
    with pytest.raises(RuntimeError, match="size mismatch"):  # ids keep their index, so rows must not move
        model.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(model.first.weight("a"), before["first.embedding_bags.a.weight"])
    assert len(model.first.index("a")) > 0
    with refused("shape_mismatch", "first.embedding_bags.a.weight", match=r"\(91, 4\)", error=recfx.CheckpointError):
        model.load_state_dict(OnePart(91).state_dict())
    assert len(model.first.index("a")) > 0
    with pytest.warns(UserWarning, match="ids are lost"):
        model.load_state_dict(plain.state_dict())
    assert torch.equal(model.first.weight("a")[:30], plain.first.embedding_bags["a"].weight)
    assert torch.equal(model.first.weight("a")[30:], before["first.embedding_bags.a.weight"][30:])
    assert len(model.first.index("a")) == 0


def test_a_table_on_meta_has_no_rows_to_put_between() -> None:
    target = Training.build("sgd", rows=333, model_class=OnePart).model.to("meta")
    with refused("rows_mismatch", error=recfx.CheckpointError):
        target.load_state_dict(source_of("sgd").model.state_dict(), assign=True)


def test_an_ordinary_optimizer_does_not_follow(tmp_path: Path) -> None:
    source, target = (recfx.convert(OnePart(rows), hashing=recfx.HashConfig(dense_rows=0)) for rows in (100, 200))
    optimizers = [torch.optim.Adam(training.parameters()) for training in (source, target)]
    source(batch(0)).sum().backward()
    optimizers[0].step()
    recfx.save_checkpoint(source, tmp_path, optimizer=optimizers[0])
    before = copy.deepcopy(dict(target.state_dict()))
    with refused("checkpoint_mismatch", error=recfx.CheckpointError):
        recfx.load_checkpoint(target, tmp_path, optimizer=optimizers[1])
    assert_same(dict(target.state_dict()), before)
    recfx.load_checkpoint(target, tmp_path)
    assert torch.equal(source.eval()(batch(0)), target.eval()(batch(0)))


def test_rows_that_were_used_before_are_filled_again_in_the_bigger_table() -> None:
    """The table has its own ``init_fn``: what trained ids have left behind is no new id's beginning."""

    def table(rows: int) -> Any:
        config = EmbeddingBagConfig(
            name="t",
            num_embeddings=rows,
            embedding_dim=4,
            feature_names=["t"],
            init_fn=partial(nn.init.constant_, val=0.5),
        )
        return recfx.HashEmbeddingBagCollection([config])

    def features(ids: list[int]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["t"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))

    small, big = table(4), table(12)
    small(features([1, 2]))
    big(features(list(range(100, 110))))
    with torch.no_grad():
        big.weight("t").fill_(7.0)  # all of them were trained
    big.load_state_dict(small.state_dict())
    assert big(features(list(range(200, 208)))).values().unique().tolist() == [0.5]
