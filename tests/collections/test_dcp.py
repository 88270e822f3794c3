"""``torch.distributed.checkpoint`` used directly, as its own documentation does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from recfx.checkpoint.directory import Manifest
from tests.checkpoint.training import Training, assert_same, batch


def save(state: dict[str, Any], directory: Path) -> None:
    dcp.save(state, checkpoint_id=directory, no_dist=True)


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "aside"])
def test_round_trip(tmp_path: Path, in_place: bool) -> None:
    source, target = Training.build(), Training.build(seed=9)
    source.steps(0, 3)
    target.steps(5, 6)
    save(source.model.state_dict(), tmp_path)
    state = target.model.state_dict()
    if not in_place:
        state = {name: torch.empty_like(value) for name, value in state.items()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    target.model.load_state_dict(state)
    assert_same(dict(target.model.state_dict()), dict(source.model.state_dict()))
    for training in (source, target):
        training.model.eval()
    assert torch.equal(source.model(batch(1)), target.model(batch(1)))
    ids = torch.arange(10**12, 10**12 + 30)
    indexes = [training.model.second.index("c") for training in (source, target)]
    assert torch.equal(indexes[0].find(ids), indexes[1].find(ids))
    assert torch.equal(indexes[0].find_or_insert(ids), indexes[1].find_or_insert(ids))


def test_the_data_folder_of_a_checkpoint_is_one_of_dcp(tmp_path: Path) -> None:
    training = Training.build()
    training.steps(0, 2)
    training.save(tmp_path)
    state_of_model = training.model.state_dict()
    state = {f"model.{name}": torch.empty_like(value) for name, value in state_of_model.items()}
    dcp.load(state, checkpoint_id=tmp_path / Manifest.read(tmp_path).data, no_dist=True)
    assert_same(state, {f"model.{name}": value for name, value in state_of_model.items()})
