"""Names and tensors of a model that a checkpoint cannot be read into, or not as bytes: told before any change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
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
