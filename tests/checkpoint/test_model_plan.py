"""What of a model is loaded in place, aside, or by its modules; and what is refused of the names that it has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.checkpoint.storage import SavedFolder
from recfx.checkpoint.tables import TablePlan
from recfx.hashing import state
from tests.checkpoint.crafted import change_settings
from tests.checkpoint.training import OnePart, Training, assert_same, batch
from tests.support.refusals import refused


class Stateful(nn.Module):
    """Keeps a dict that it changes in place, and refuses what has no ``calls``; or a tensor of any shape."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, dict):
            self.value["inner"].clear()
            self.value["inner"]["calls"] = state["inner"]["calls"] + 0
        else:
            self.value = state


class Silent(nn.Module):
    """Has no state."""


class Model(nn.Module):
    def __init__(self, calls: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(calls)
        self.before = nn.Linear(8, 4)
        self.silent = Silent()
        self.first = Stateful({"inner": {"calls": calls}})
        self.second = Stateful({"inner": {"calls": calls}})
        self.tensor = Stateful(torch.full((size,), float(calls)))
        self.after = nn.Linear(4, 2)


class StartsAnew(nn.Linear):
    """Writes to its parameters before it takes what was saved."""

    def _load_from_state_dict(self, *of_state: Any) -> None:
        self.reset_parameters()
        super()._load_from_state_dict(*of_state)


@pytest.mark.parametrize("way", ["module", "hook"])
def test_modules_may_write_to_their_parameters_before_they_load(way: str, tmp_path: Path) -> None:
    models = [nn.Sequential(StartsAnew(2, 2) if way == "module" else nn.Linear(2, 2), nn.Linear(2, 2)) for _ in "ab"]
    if way == "hook":
        models[1][0].register_load_state_dict_pre_hook(lambda module, *_: nn.init.zeros_(module.weight))
    recfx.save_checkpoint(models[0], tmp_path)
    recfx.load_checkpoint(models[1], tmp_path)
    assert_same(models[1].state_dict(), models[0].state_dict())


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def extra(model: Any) -> tuple[Any, Any, list[float]]:
    return model.first.value["inner"], model.second.value["inner"], model.tensor.value.tolist()


def change(directory: Path, changed: Any) -> None:
    """Other extra states."""
    change_settings(directory, lambda settings: settings["extra_state"].update(changed))


def not_loaded(model: Any, directory: Path) -> recfx.CheckpointError:
    before, states = weights(model), json.dumps(extra(model))
    with pytest.raises(recfx.CheckpointError) as caught:
        recfx.load_checkpoint(model, directory)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    assert json.dumps(extra(model)) == states
    assert caught.value.reason == "checkpoint_mismatch"
    return caught.value


def test_extra_states_of_modules_inside(tmp_path: Path) -> None:
    source, target = Model(1, 2), Model(5, 3)
    recfx.save_checkpoint(source, tmp_path)
    recfx.load_checkpoint(target, tmp_path)
    assert extra(target) == ({"calls": 1}, {"calls": 1}, [1.0, 1.0])
    assert all(torch.equal(value, weights(source)[name]) for name, value in weights(target).items())


def test_a_module_inside_that_refuses_its_state(tmp_path: Path) -> None:
    """The one before it gets back what it had, though it changes its state in place."""
    recfx.save_checkpoint(Model(1, 2), tmp_path)
    change(tmp_path, {"second._extra_state": {"inner": {"calls": "many"}}})
    error = not_loaded(Model(5, 2), tmp_path)
    assert error.module_path == "second"
    assert "the Stateful does not accept what was saved (TypeError" in error.message


def training(seed: int) -> Training:
    return Training.build("adam", rows=120, seed=seed, model_class=OnePart)


@pytest.mark.parametrize("where", ["weights", "index"])
def test_an_interrupted_load_is_made_good_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    source, target = training(0), training(3)
    source.steps(0, 2)
    source.save(tmp_path)
    target.steps(5, 6)
    begun: list[bool] = []

    def begin(plan: TablePlan) -> None:
        begun.append(True)
        expect_load(plan)

    def interrupt(*arguments: Any) -> Any:
        if begun:
            raise KeyboardInterrupt
        return ordinary(*arguments)

    module, name = (SavedFolder, "read_into") if where == "weights" else (state, "buffers_from_state")
    ordinary: Any = getattr(module, name)
    expect_load = TablePlan.expect_load
    with monkeypatch.context() as patched:
        patched.setattr(TablePlan, "expect_load", begin)
        patched.setattr(module, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            target.load(tmp_path)
    for use in (lambda: target.model(batch(0)), target.model.state_dict, lambda: target.save(tmp_path)):
        with refused("load_interrupted", error=recfx.CheckpointError):
            use()
    target.load(tmp_path)
    actual, expected = target.everything(), source.everything()
    for contents in (actual, expected):
        del contents["first.a.slot_groups"]  # which order ids came in
    assert_same(actual, expected)
