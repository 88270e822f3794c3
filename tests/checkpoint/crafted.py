"""Checkpoints with other content than was saved, under checksums that are right."""

import hashlib
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import recfx
from recfx.checkpoint import storage
from recfx.checkpoint.directory import Manifest, new_name
from recfx.checkpoint.storage import SavedFolder, pack_settings, read_settings
from tests.checkpoint.training import Training, assert_same


class Runs:
    """A pickle of this makes the directory ``marker`` when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)

    @property
    def content(self) -> bytes:
        return pickle.dumps(self, 2)


def data_of(directory: Path) -> Path:
    return directory / Manifest.read(directory).data


def reseal(directory: Path, **changed: Any) -> None:
    """Let the manifest have the sizes and checksums of the files as they are now, and what is ``changed``."""
    path = directory / "checkpoint.json"
    manifest = json.loads(path.read_bytes().splitlines()[0]) | changed
    for name, entry in manifest["files"].items():
        content = (directory / manifest["data"] / name).read_bytes()
        entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    line = json.dumps(manifest).encode()
    path.write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")


def change_tensors(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    saved = SavedFolder(data_of(directory))
    tensors: dict[str, Any] = saved.read(saved.described)
    change(tensors)
    folder = directory / new_name()
    storage.write(folder, tensors)
    Manifest.of_folder(folder).switch(directory)


def change_settings(directory: Path, change: Callable[[Any], object]) -> None:
    settings = read_settings(SavedFolder(data_of(directory)))
    change(settings)
    change_tensors(directory, lambda tensors: tensors.update(settings=pack_settings(settings)))


def refused(training: Training, directory: Path, **arguments: Any) -> recfx.CheckpointError:
    """The error of loading; nothing may have changed, random numbers included."""
    before, random_numbers = training.everything(), (torch.get_rng_state(), random.getstate())
    with pytest.raises(recfx.CheckpointError) as caught:
        recfx.load_checkpoint(training.model, directory, **{"optimizer": training.optimizer, **arguments})
    assert_same(training.everything(), before)
    assert torch.equal(torch.get_rng_state(), random_numbers[0])
    assert random.getstate() == random_numbers[1]
    return caught.value
