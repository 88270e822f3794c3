"""Averages of models with hashed tables: torch's ``AveragedModel`` is refused, and states are not averaged."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torchrec import KeyedJaggedTensor

import recfx
from tests.builders.collections import one_table
from tests.builders.models import Over
from tests.builders.optimizers import attach
from tests.support.refusals import refused

DECAY = 0.7


def batch(ids: torch.Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones_like(ids))


def by_id(model: nn.Module) -> dict[int, torch.Tensor]:
    """The row of each id."""
    ids, rows = model.get_submodule("ebc").index("t").items()  # type: ignore[operator]
    weight = model.get_submodule("ebc").weight("t").detach()  # type: ignore[operator]
    return {int(id_): weight[row].clone() for id_, row in zip(ids, rows, strict=True)}


def converted(hashing: recfx.HashConfig | None) -> nn.Module:
    torch.manual_seed(0)
    model = Over(one_table(rows=192, dim=4), 4)
    attach(model.ebc, torch.optim.Adagrad, lr=0.5)
    return recfx.convert(model, hashing=hashing)


def hashed() -> nn.Module:
    return converted(recfx.HashConfig(dense_rows=0))


def step(models: list[nn.Module], ids: torch.Tensor) -> None:
    for model in models:
        model(batch(ids)).square().sum().backward()


@pytest.mark.parametrize("use_buffers", [False, True])
def test_averages_are_those_of_rows(use_buffers: bool) -> None:
    model = converted(None)
    average = AveragedModel(model, use_buffers=use_buffers)
    average.update_parameters(model)
    torch.testing.assert_close(average.module.ebc.weight("t"), model.ebc.weight("t"))
    with_index = hashed()
    average = AveragedModel(with_index, use_buffers=use_buffers)
    before = copy.deepcopy(average.state_dict())
    with refused("averaged_index", "ebc"):
        average.update_parameters(with_index)
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
    with refused("averaged_index", "t", error=recfx.CheckpointError):
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
