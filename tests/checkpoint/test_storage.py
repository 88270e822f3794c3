"""Tensors and settings in a folder of DCP: any part is read into any tensor, and no file runs code."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx.checkpoint import storage
from recfx.checkpoint.storage import Parts, SavedFolder
from tests.checkpoint.crafted import Runs, change_tensors, data_of, reseal

TENSORS = {
    "scalar": torch.tensor(3.5),
    "byte": torch.tensor([7], dtype=torch.uint8),
    "none": torch.empty(0),
    "no_columns": torch.empty(3, 0),
    "row": torch.arange(7.0),
    "table": torch.arange(35.0).view(7, 5),
    "turned": torch.arange(35.0).view(5, 7).t(),
    "strided": torch.eye(3)[:1, 1],  # contiguous, but with a stride of three
    "deep": torch.arange(60.0).view(3, 4, 5),
    "ids": torch.arange(6).view(6),
}

CUT = torch.arange(24.0).view(4, 6)


@pytest.fixture
def folder(tmp_path: Path) -> SavedFolder:
    cut = Parts((4, 6)).put((0, 2), CUT[:, 2:]).put((0, 0), CUT[:, :2])
    storage.write(tmp_path / "data", {**TENSORS, "cut": cut})
    return SavedFolder(tmp_path / "data")


def whole(name: str) -> torch.Tensor:
    return CUT if name == "cut" else TENSORS[name]


def rectangles(size: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Begin and length of the whole, of an inner part, and of one element, in every dimension."""
    sides = [[(0, length), (length // 3, length - length // 3 - (length > 3)), (length - 1, 1)] for length in size]
    for chosen in itertools.product(*[side if length else side[:1] for side, length in zip(sides, size, strict=True)]):
        yield tuple(begin for begin, _ in chosen), tuple(length for _, length in chosen)


def targets(lengths: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Empty tensors of one size: laid out as in the file, with gaps between rows and columns, and of another dtype."""
    yield torch.full(lengths, -1, dtype=dtype)
    yield torch.full([*[2 * length for length in lengths], 2], -1, dtype=dtype)[
        (*[slice(0, 2 * length, 2) for length in lengths], 0)
    ]
    yield torch.full(lengths, -1, dtype=torch.float64)


@pytest.mark.parametrize("name", [*TENSORS, "cut"])
def test_any_part_is_read(folder: SavedFolder, name: str) -> None:
    expected = CUT if name == "cut" else TENSORS[name]
    for begin, lengths in rectangles(expected.shape):
        part = expected
        for dimension, (first, length) in enumerate(zip(begin, lengths, strict=True)):
            part = part.narrow(dimension, first, length)
        for target in targets(lengths, expected.dtype):
            version = target._version
            folder.read_into({name: Parts(tuple(expected.shape)).put(begin, target)})
            assert torch.equal(target, part.to(target.dtype))
            assert target._version > version or not target.numel()


@pytest.mark.parametrize(
    "mode", [torch.inference_mode(), torch.device("meta"), torch.no_grad()], ids=["inference", "meta", "no_grad"]
)
def test_whatever_the_callers_modes_are(folder: SavedFolder, mode: Any) -> None:
    with mode:
        loaded = folder.read(["table"])["table"]
    assert (loaded.device.type, loaded.is_inference()) == ("cpu", False)
    assert torch.equal(loaded, TENSORS["table"])


def test_saving_is_silent(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        storage.write(tmp_path / "data", {"a": torch.ones(2)})
    assert not caught


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
