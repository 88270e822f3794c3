"""Tensors and settings in a folder of DCP: any part is read into any tensor, and no file runs code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.checkpoint import storage
from recfx.checkpoint.storage import Parts, SavedFolder
from tests.checkpoint.crafted import Runs, change_tensors, data_of, reseal


@pytest.mark.parametrize(
    "mode", [torch.inference_mode(), torch.device("meta"), torch.no_grad()], ids=["inference", "meta", "no_grad"]
)
def test_whatever_the_callers_modes_are(tmp_path: Path, mode: Any) -> None:
    table = torch.arange(24.0).view(4, 6)
    parts = Parts((4, 6)).put((0, 2), table[:, 2:]).put((0, 0), table[:, :2])
    storage.write(tmp_path / "data", {"table": parts})
    with mode:
        loaded = SavedFolder(tmp_path / "data").read(["table"])["table"]
    assert (loaded.device.type, loaded.is_inference()) == ("cpu", False)
    assert torch.equal(loaded, table)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "settings"])
def test_no_file_runs_code(tmp_path: Path, file: str) -> None:
    """Though its checksum is right."""
    model, runs = nn.Linear(2, 2), Runs(tmp_path / "ran")
    recfx.save_checkpoint(model, tmp_path / "saved")
    if file == "settings":
        content = torch.frombuffer(bytearray(runs.content), dtype=torch.uint8)
        change_tensors(tmp_path / "saved", lambda tensors: tensors.update(settings=content))
    else:
        (data_of(tmp_path / "saved") / file).write_bytes(runs.content)
        reseal(tmp_path / "saved")
    with pytest.raises(recfx.CheckpointError):
        recfx.load_checkpoint(model, tmp_path / "saved")
    assert not (tmp_path / "ran").exists()
