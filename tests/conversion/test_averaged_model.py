"""Averages of models with hashed tables: torch's ``AveragedModel`` follows the ids, and states are not averaged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_avg_fn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

import recfx
from tests.builders.optimizers import attach
from tests.support.refusals import refused

IDS, DECAY = 24, 0.7
WAYS: dict[str, dict[str, Any]] = {
    "swa": {},
    "swa_fn": {"avg_fn": get_swa_avg_fn()},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)},
    "ema_fn": {"avg_fn": get_ema_avg_fn(DECAY)},
}


class Model(nn.Module):
    """One table, with a buffer and a layer beside it."""

    def __init__(
        self, rows: int = IDS, init_fn: Callable[[torch.Tensor], object] | None = None, is_pooled: bool = True
    ) -> None:
        super().__init__()
        config = (EmbeddingBagConfig if is_pooled else EmbeddingConfig)(
            name="t", embedding_dim=4, num_embeddings=rows, feature_names=["f"], weight_init_min=-1, weight_init_max=1
        )
        if init_fn is not None:
            config.init_fn = init_fn
        self.sparse = (EmbeddingBagCollection if is_pooled else EmbeddingCollection)(tables=[config])
        self.norm = nn.BatchNorm1d(4)
        self.over = nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.sparse(features)["f"]  # one id per sample
        answer: torch.Tensor = self.over(self.norm(rows if isinstance(rows, torch.Tensor) else rows.values()))
        return answer


def batch(ids: torch.Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones_like(ids))


def index_of(model: nn.Module) -> recfx.HashIndex:
    index: recfx.HashIndex = model.get_submodule("sparse").index("t")  # type: ignore[operator]
    return index


def by_id(model: nn.Module) -> dict[int, torch.Tensor]:
    """The row of each id."""
    ids, rows = index_of(model).items()
    weight = model.get_submodule("sparse").weight("t").detach()  # type: ignore[operator]
    return {int(id_): weight[row].clone() for id_, row in zip(ids, rows, strict=True)}


def hashed(
    rows: int = 8 * IDS,
    init_fn: Callable[[torch.Tensor], object] | None = None,
    *,
    is_pooled: bool = True,
    **hashing: Any,
) -> Model:
    """Converted, with a table that is trained."""
    torch.manual_seed(0)
    model = Model(rows, init_fn, is_pooled)
    attach(model.sparse, torch.optim.Adagrad, lr=0.5)
    converted: Model = recfx.convert(model, hashing=recfx.HashConfig(dense_rows=0, **hashing))
    return converted


def initial_rows() -> dict[int, torch.Tensor]:
    """What the row of each id begins with."""
    model = hashed()
    model.sparse(batch(torch.arange(IDS)))
    return by_id(model)


def step(models: list[nn.Module], ids: torch.Tensor) -> None:
    for model in models:
        model(batch(ids)).square().sum().backward()
        with torch.no_grad():
            for parameter in model.over.parameters():  # type: ignore[union-attr]
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("way", sorted(WAYS))
@pytest.mark.parametrize("is_pooled", [True, False], ids=["pooled", "sequence"])
def test_averages_are_those_of_a_standard_table_with_a_row_for_every_id(
    way: str, use_buffers: bool, is_pooled: bool
) -> None:
    torch.manual_seed(0)
    standard = Model(is_pooled=is_pooled)
    attach(standard.sparse, torch.optim.Adagrad, lr=0.5)
    first, model = initial_rows(), hashed(is_pooled=is_pooled)
    model.over.load_state_dict(standard.over.state_dict())
    with torch.no_grad():
        next(standard.sparse.parameters()).copy_(torch.stack([first[id_] for id_ in range(IDS)]))
    averages = [AveragedModel(trained, use_buffers=use_buffers, **WAYS[way]) for trained in (standard, model)]
    generator = torch.Generator().manual_seed(1)
    for number in range(9):
        step([standard, model], torch.randint(min(3 * number + 3, IDS), (6,), generator=generator))
        if number % 3 != 1:
            for averaged, trained in zip(averages, (standard, model), strict=True):
                averaged.update_parameters(trained)
        known = index_of(averages[1].module).items()[0]
        expected, output = (average.eval()(batch(known)) for average in averages)
        torch.testing.assert_close(output, expected)
    assert len(index_of(model)) > 12


@pytest.mark.parametrize("own_init_fn", [False, True])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_rows_that_other_ids_get_start_anew_and_ids_with_other_rows_go_on(use_buffers: bool, own_init_fn: bool) -> None:
    """By hand; an id that loses its row and gets another one before the next update has its average still."""
    model = hashed(8, torch.nn.init.normal_ if own_init_fn else None, on_full="evict")
    first = initial_rows()
    averaged = AveragedModel(model, use_buffers=use_buffers, **WAYS["ema"])
    expected: dict[int, torch.Tensor] = {}
    rows: dict[int, int] = {}
    moved = 0
    generator = torch.Generator().manual_seed(3)
    for number in range(30):
        for _ in range(1 + number % 3):
            step([model], torch.randint(14, (5,), generator=generator))
        averaged.update_parameters(model)
        now = by_id(model)
        starts = now if own_init_fn or number == 0 else first
        if number == 0:
            expected = now
        else:
            expected = {id_: expected.get(id_, starts[id_]).lerp(row, 1 - DECAY) for id_, row in now.items()}
        averages = by_id(averaged.module)
        assert averages.keys() == expected.keys()
        for id_, row in averages.items():
            torch.testing.assert_close(row, expected[id_])
        rows_now = dict(zip(*(item.tolist() for item in index_of(model).items()), strict=True))
        moved += sum(id_ in rows and rows[id_] != row for id_, row in rows_now.items())
        rows = rows_now
        assert torch.equal(index_of(averaged.module).row_scores, index_of(model).row_scores)
        assert index_of(averaged.module).counters["evicted"] == index_of(model).counters["evicted"]
    assert index_of(model).counters["evicted"] > 20
    assert moved > 0


def test_rows_of_dense_ids_and_models_without_indexes_are_averaged_as_ever() -> None:
    model = recfx.convert(Model(), hashing=recfx.HashConfig(rows=IDS + 8))
    plain = recfx.convert(Model())
    for trained in (model, plain):
        averaged = AveragedModel(trained, use_buffers=True, **WAYS["ema"])
        averaged.update_parameters(trained)
        weight = trained.get_parameter("sparse.embedding_bags.t.weight")
        before = weight.detach().clone()
        with torch.no_grad():
            weight += 1
        averaged.update_parameters(trained)
        average = averaged.module.get_parameter("sparse.embedding_bags.t.weight")
        torch.testing.assert_close(average.detach(), before + 1 - DECAY)


def test_buffers_are_back_if_averaging_fails() -> None:
    model = hashed()
    averaged = AveragedModel(model, use_buffers=True, avg_fn=lambda *_: None)
    averaged.update_parameters(model)
    before = {name for name, _ in model.named_buffers()}
    with pytest.raises(TypeError):
        averaged.update_parameters(model)
    assert {name for name, _ in model.named_buffers()} == before
    assert {name.removeprefix("module.") for name, _ in averaged.named_buffers()} >= before


@pytest.mark.parametrize("averages", [lambda: Model(), lambda: recfx.convert(Model())], ids=["plain", "dense"])
def test_an_average_that_was_made_before_the_conversion_is_told_what_to_average(
    averages: Callable[[], nn.Module],
) -> None:
    model, other = hashed(), averages()
    step([model], torch.arange(5))
    for average, update in ((AveragedModel(other), model), (AveragedModel(model), other)):
        before = {key: value.clone() for key, value in average.state_dict().items()}
        with refused("other_indexes", match="from the converted model"):
            average.update_parameters(update)
        assert all(torch.equal(value, before[key]) for key, value in average.state_dict().items())


def average_in_place(averaged: nn.Module, model: nn.Module) -> None:
    for mine, theirs in zip(averaged.state_dict().values(), model.state_dict().values(), strict=True):
        mine.copy_(DECAY * mine + (1 - DECAY) * theirs)


@pytest.mark.parametrize("as_integers", [True, False])
def test_states_that_were_averaged_with_their_indexes_are_told_from_others(as_integers: bool) -> None:
    model, other = hashed(), hashed()
    step([model, other], torch.arange(5))
    state = {key: DECAY * value + (1 - DECAY) * value for key, value in model.state_dict().items()}
    if as_integers:
        state = {key: value.to(model.state_dict()[key].dtype) for key, value in state.items()}
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with refused("averaged_index", "t", match="AveragedModel", error=recfx.CheckpointError):
        other.load_state_dict(state)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    kept = {key: state[key] if value.is_floating_point() else value for key, value in model.state_dict().items()}
    other.load_state_dict(kept)
    torch.testing.assert_close(by_id(other), by_id(model))


def test_an_index_that_was_averaged_in_place_is_not_read() -> None:
    model = hashed()
    averaged = copy.deepcopy(model)
    step([model], torch.arange(5))
    average_in_place(averaged, model)
    with refused("averaged_index", error=recfx.CheckpointError):
        averaged.eval()(batch(torch.arange(5)))
