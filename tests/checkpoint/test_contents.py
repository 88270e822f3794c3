"""What is in a checkpoint, the states of optimizers included."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import recfx
from tests.support.refusals import refused


class With(nn.Module):
    """A layer, a buffer, and a layer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.before = nn.Linear(2, 2)
        self.register_buffer("buffer", buffer)
        self.after = nn.Linear(2, 2)


def not_loaded(model: nn.Module, directory: Path) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(recfx.CheckpointError) as caught:
        recfx.load_checkpoint(model, directory)
    for name, value in model.state_dict().items():
        assert torch.equal(value.to_dense(), before[name].to_dense()), name
    return caught.value.reason


@pytest.mark.parametrize("numbers", [5, 1 << 20], ids=["aside", "in_place"])
def test_expanded(tmp_path: Path, numbers: int) -> None:
    recfx.save_checkpoint(With(torch.zeros(numbers)), tmp_path)
    assert not_loaded(With(torch.zeros(1).expand(numbers)), tmp_path) == "value_not_supported"


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    with refused("value_not_supported", match="expanded", error=recfx.CheckpointError):
        recfx.save_checkpoint(With(torch.ones(1).expand(5)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_lazy_modules(tmp_path: Path) -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(2))

    with refused("model_is_lazy", error=recfx.CheckpointError):
        recfx.save_checkpoint(lazy(), tmp_path)
    model = lazy()
    model(torch.ones(1, 2))
    recfx.save_checkpoint(model, tmp_path)
    target = lazy()
    with refused("model_is_lazy", error=recfx.CheckpointError):
        recfx.load_checkpoint(target, tmp_path)
    target(torch.ones(1, 2))
    recfx.load_checkpoint(target, tmp_path)


def test_tensors_made_of_others(tmp_path: Path) -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = With(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        with refused("value_not_supported", match="DTensor", error=recfx.CheckpointError):
            recfx.save_checkpoint(model, tmp_path)
    finally:
        dist.destroy_process_group()
    assert not list(tmp_path.iterdir())


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


def saved(directory: Path, kind: str) -> None:
    """A checkpoint after two steps."""
    model, optimizer = build(kind)
    for number in range(2):
        step(model, optimizer, number)
    recfx.save_checkpoint(model, directory, optimizer=optimizer)


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


def test_numbers_of_numpy(tmp_path: Path) -> None:
    model, optimizer = build("adam", lr=numpy.float64(0.01))
    step(model, optimizer, 0)
    recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
    for setting in (numpy.float64(0.5), 0.5):
        target, its_optimizer = build("adam", 3, lr=setting)
        recfx.load_checkpoint(target, tmp_path, optimizer=its_optimizer)
        assert its_optimizer.param_groups[0]["lr"] == 0.01
    model, optimizer = build("adam", lr=numpy.float32(0.01))  # torch reckons with it as with no other number
    with refused("value_not_supported", match="numpy", error=recfx.CheckpointError):
        recfx.save_checkpoint(model, tmp_path, optimizer=optimizer)
