"""Crafted checkpoints that would take hours or all memory, or leave bytes in memory that no tensor may have."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.checkpoint import plain_data, settings
from tests.checkpoint.crafted import change_index, data_of, manifest_of, refused, reseal, seal
from tests.checkpoint.training import OnePart, Training


def training() -> Training:
    return Training.build("adam", rows=40, model_class=OnePart)


def test_a_name_of_any_length_is_refused_at_once(tmp_path: Path) -> None:
    trained = training()
    trained.save(tmp_path)

    nothing = {"dtype": "uint8", "size": [0], "chunks": []}
    change_index(tmp_path, lambda index: index["tensors"].update({"model." + "hash_indexes." * 12_000: nothing}))
    begin = time.process_time()
    error = refused(trained, tmp_path)
    assert time.process_time() - begin < 10
    assert error.reason == "checkpoint_mismatch"
    assert len(str(error)) < 2_000


@pytest.mark.parametrize("name", ["row_ids", "counts", "settings"])
def test_what_is_much_too_big_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A file of many gigabytes costs nobody anything: it is sparse."""
    trained = training()
    trained.save(tmp_path)
    numbers, key = 1 << 21, name if name == "settings" else f"model.first.hash_indexes.a.{name}"
    monkeypatch.setattr(settings, "_MOST_BYTES", 1 << 20)

    much = {"size": [numbers], "chunks": [[[0], [numbers], "__9_9.distcp", 0]]}
    (data_of(tmp_path) / "__9_9.distcp").write_bytes(b"")
    os.truncate(data_of(tmp_path) / "__9_9.distcp", numbers * 8)
    manifest = manifest_of(tmp_path)
    manifest["files"]["__9_9.distcp"] = {"bytes": 0, "sha256": "0" * 64}
    seal(tmp_path, manifest)
    change_index(tmp_path, lambda index: index["tensors"][key].update(much))
    allocated: list[int] = []
    empty = torch.empty

    def watch(*size: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*size, **options)
        allocated.append(0 if tensor.is_meta else tensor.numel())
        return tensor

    empty_like = torch.empty_like

    def watch_like(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        allocated.append(tensor.numel())
        return empty_like(tensor, **options)

    monkeypatch.setattr(torch, "empty", watch)
    monkeypatch.setattr(torch, "empty_like", watch_like)
    assert refused(trained, tmp_path).reason == ("checkpoint_torn" if name == "settings" else "rows_mismatch")
    assert max(allocated, default=0) < 1 << 20


def test_settings_that_nobody_could_load_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_MOST_BYTES", 100)
    with pytest.raises(recfx.CheckpointError, match="bytes together") as caught:
        training().save(tmp_path)
    assert caught.value.reason == "value_not_supported"
    assert not list(tmp_path.iterdir())


class Masked(nn.Module):
    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.zeros(numbers, dtype=torch.bool))


@pytest.mark.parametrize("numbers", [10, 1 << 20], ids=["aside", "in_place"])
def test_a_bool_is_0_or_1_whatever_the_file_says(tmp_path: Path, numbers: int) -> None:
    recfx.save_checkpoint(Masked(numbers), tmp_path)
    index = json.loads((data_of(tmp_path) / "tensors.json").read_bytes())
    _, _, file, begin = index["tensors"]["model.mask"]["chunks"][0]
    with open(data_of(tmp_path) / file, "r+b") as stream:
        stream.seek(begin)
        stream.write(b"\xff" * numbers)
    reseal(tmp_path)
    loaded = Masked(numbers)
    recfx.load_checkpoint(loaded, tmp_path)
    mask = loaded.get_buffer("mask")
    assert mask.view(torch.uint8).unique().tolist() == [1]


def test_a_bool_of_the_settings_is_0_or_1() -> None:
    content = json.loads(plain_data.encode(torch.zeros(3, dtype=torch.bool)))
    content["tensor"]["content"] = "/wIA"  # the bytes 255, 2 and 0
    decoded = plain_data.decode(json.dumps(content).encode())
    assert decoded.view(torch.uint8).tolist() == [1, 1, 0]
