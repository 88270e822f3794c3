"""The saved state of an ordinary optimizer: what the next step could not go on from is refused, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn, optim

import recfx
from recfx.checkpoint import plain_data
from tests.checkpoint.crafted import change_index, replace_settings, settings_of
from tests.support.refusals import refused

OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "adadelta": (optim.Adadelta, {}),
    "adagrad": (optim.Adagrad, {}),
    "adam": (optim.Adam, {}),
    "adam_amsgrad": (optim.Adam, {"amsgrad": True}),
    "adamw": (optim.AdamW, {}),
    "adamax": (optim.Adamax, {}),
    "asgd": (optim.ASGD, {}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "rprop": (optim.Rprop, {}),
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd_plain": (optim.SGD, {"lr": 0.1}),
}


class Layers(nn.Module):
    """Parameters of no, one and two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


def build(kind: str, seed: int = 0, **settings: Any) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(seed)
    model = Layers()
    optimizer_class, defaults = OPTIMIZERS[kind]
    optimizer: Any = optimizer_class
    return model, optimizer(model.parameters(), **{**defaults, **settings})


def step(model: nn.Module, optimizer: optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(torch.full((4, 3), float(number + 1))).square().sum().backward()
    optimizer.step()


def saved(directory: Path, kind: str) -> Any:
    """A checkpoint after two steps; what it keeps beside tensors."""
    model, optimizer = build(kind)
    for number in range(2):
        step(model, optimizer, number)
    recfx.save_checkpoint(model, directory, optimizer=optimizer)
    return plain_data.decode(json.dumps(settings_of(directory)).encode())


def not_loaded(directory: Path, kind: str, settings: Any) -> str:
    replace_settings(directory, plain_data.encode(settings))
    model, optimizer = build(kind, 3)
    before = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    with refused("checkpoint_mismatch", error=recfx.CheckpointError) as caught:
        recfx.load_checkpoint(model, directory, optimizer=optimizer)
    torch.testing.assert_close((dict(model.state_dict()), optimizer.state_dict()), before, rtol=0, atol=0)
    return caught.value.message


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_to_the_bit(tmp_path: Path, kind: str) -> None:
    saved(tmp_path, kind)
    model, optimizer = build(kind, 3)
    recfx.load_checkpoint(model, tmp_path, optimizer=optimizer)
    straight, its_optimizer = build(kind)
    for number in range(4):
        step(straight, its_optimizer, number)
    for number in range(2, 4):
        step(model, optimizer, number)
    torch.testing.assert_close(dict(model.state_dict()), dict(straight.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if not kind.startswith("sgd")])
def test_a_state_that_lacks_something(tmp_path: Path, kind: str) -> None:
    settings = saved(tmp_path, kind)
    for name in ("scale", "layer.weight"):
        for key in settings["optimizer"]["state"][name]["tensors"]:
            without = copy.deepcopy(settings)
            without["optimizer"]["state"][name]["tensors"].remove(key)
            not_loaded(tmp_path, kind, without)


def group_of(saved: Any) -> dict[str, Any]:
    group: dict[str, Any] = saved["groups"][0]
    return group


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda saved: saved["state"]["layer.bias"].update(
                tensors=["step"], values={"exp_avg": 1.0, "exp_avg_sq": 1.0}
            ),
            "state 'exp_avg' was saved as 1.0",
        ),
        (lambda saved: group_of(saved).update(amsgrad=True), "lacks 'max_exp_avg_sq'"),
        (lambda saved: group_of(saved).update(capturable=True), ""),
        (lambda saved: group_of(saved).update(lr=[1]), "setting 'lr'"),
        (lambda saved: saved["state"]["scale"]["tensors"].append("more"), "lacks its state 'more'"),
        (lambda saved: saved["state"]["scale"].update(values={"extra": "x"}), "state 'extra' was saved as 'x'"),
    ],
)
def test_a_state_that_cannot_be_used(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    settings = saved(tmp_path, "adam")
    change(settings["optimizer"])
    assert message in not_loaded(tmp_path, "adam", settings)


def test_a_state_of_another_shape(tmp_path: Path) -> None:
    def change(index: Any) -> None:
        entry = index["tensors"]["optimizer.layer.weight.exp_avg"]
        entry["size"] = entry["chunks"][0][1] = [3, 2]

    settings = saved(tmp_path, "adam")
    change_index(tmp_path, change)
    message = "state 'exp_avg' was saved as a tensor of shape (3, 2), but the parameter is (2, 3)"
    assert message in not_loaded(tmp_path, "adam", settings)


def test_numbers_of_numpy(tmp_path: Path) -> None:
    model, optimizer = build("adam", lr=numpy.float64(0.01))
    step(model, optimizer, 0)
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    for setting in (numpy.float64(0.5), 0.5):
        target, its_optimizer = build("adam", 3, lr=setting)
        recfx.load_checkpoint(target, tmp_path, optimizer=its_optimizer)
        assert its_optimizer.param_groups[0]["lr"] == 0.01
    model, optimizer = build("adam", lr=numpy.float32(0.01))  # torch reckons with it as with no other number
    with refused("value_not_supported", match="float32", error=recfx.CheckpointError):
        recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
