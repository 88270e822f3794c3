"""Checkpoints as somebody who means harm would write them: any content, under checksums that are right."""

from __future__ import annotations

import hashlib
import io
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
from recfx.checkpoint import plain_data
from recfx.checkpoint.manifest import Manifest
from tests.checkpoint.training import Training, assert_same


class Runs:
    """A pickle of this makes the directory ``marker`` when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def pickles(marker: Path) -> dict[str, bytes]:
    """Files that run code for whoever loads them carelessly, by how they were made."""
    contents = {f"pickle_{protocol}": pickle.dumps(Runs(marker), protocol) for protocol in (0, 2, 5)}
    for name, zipped in (("torch", True), ("torch_legacy", False)):
        stream = io.BytesIO()
        torch.save(Runs(marker), stream, _use_new_zipfile_serialization=zipped)
        contents[name] = stream.getvalue()
    return contents


def data_of(directory: Path) -> Path:
    """The data folder."""
    return directory / Manifest.read(directory).data


def seal(directory: Path, manifest: Any) -> None:
    """Write a manifest of this content, with its checksum."""
    line = json.dumps(manifest).encode()
    digest = hashlib.sha256(line).hexdigest().encode()
    (directory / "checkpoint.json").write_bytes(line + b"\n" + digest + b"\n")


def manifest_of(directory: Path) -> Any:
    """What the manifest says."""
    return json.loads((directory / "checkpoint.json").read_bytes().splitlines()[0])


def reseal(directory: Path) -> None:
    """Let the manifest have the sizes and checksums of the files as they are now."""
    manifest = manifest_of(directory)
    for name, entry in manifest["files"].items():
        path = directory / manifest["data"] / name
        if path.is_file():
            content = path.read_bytes()
            entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    seal(directory, manifest)


def change_index(directory: Path, change: Callable[[Any], object]) -> None:
    """Let ``tensors.json`` say something else."""
    path = data_of(directory) / "tensors.json"
    index = json.loads(path.read_bytes())
    change(index)
    path.write_text(json.dumps(index))
    reseal(directory)


def settings_of(directory: Path) -> Any:
    """What the checkpoint keeps beside tensors, as it is in the file."""
    index = json.loads((data_of(directory) / "tensors.json").read_bytes())
    ((_, (length,), file, begin),) = index["tensors"]["settings"]["chunks"]
    return json.loads((data_of(directory) / file).read_bytes()[begin : begin + length])


def replace_settings(directory: Path, content: bytes) -> None:
    """Other settings, behind the end of their file."""

    def append(index: Any) -> None:
        chunk = index["tensors"]["settings"]["chunks"][0]
        with open(data_of(directory) / chunk[2], "ab") as file:
            chunk[3] = file.tell()
            file.write(content)
        index["tensors"]["settings"]["size"] = chunk[1] = [len(content)]

    change_index(directory, append)


def change_settings(directory: Path, change: Callable[[Any], object]) -> None:
    """Other settings; ``change`` gets the values, not their JSON."""
    settings = plain_data.decode(json.dumps(settings_of(directory)).encode())
    change(settings)
    replace_settings(directory, plain_data.encode(settings))


def refused(training: Training, directory: Path, **arguments: Any) -> recfx.CheckpointError:
    """The error of loading; nothing may have changed, random numbers included."""
    before, random_numbers = training.everything(), (torch.get_rng_state(), random.getstate())
    with pytest.raises(recfx.CheckpointError) as caught:
        recfx.load_checkpoint(training.model, directory, **{"optimizer": training.optimizer, **arguments})
    assert_same(training.everything(), before)
    assert torch.equal(torch.get_rng_state(), random_numbers[0])
    assert random.getstate() == random_numbers[1]
    return caught.value
