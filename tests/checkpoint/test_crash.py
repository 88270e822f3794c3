"""A writer that is killed at any moment leaves the old checkpoint or the new one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import recfx
from recfx.checkpoint import directory as checkpoint_directory
from recfx.checkpoint import storage
from recfx.checkpoint.manifest import Manifest
from tests.checkpoint.training import Training

ROOT = Path(__file__).resolve().parents[2]


def test_a_killed_writer_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    (tmp_path / "bystander").write_text("untouched")
    command = [sys.executable, "-m", "tests.checkpoint.killed_writer", str(directory)]
    result = subprocess.run(command, cwd=ROOT, timeout=300, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    attempts = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    current = 0
    outcomes = set()
    for number, (attempt, status, version) in enumerate(attempts, start=1):
        assert attempt == number
        assert version in (current, attempt)
        outcomes.add((status, version == attempt))
        current = version
    assert outcomes == {(-signal.SIGKILL, False), (-signal.SIGKILL, True), (0, True)}
    assert len(attempts) > 100
    assert sorted(os.listdir(tmp_path)) == ["bystander", "checkpoint"]
    assert sorted(os.listdir(directory)) == ["checkpoint.json", Manifest.read(directory).data], "leftovers are cleaned"


def test_everything_is_on_the_disk_before_the_switch_and_the_switch_before_the_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL keeps what the system has buffered, a power cut does not: the order of the calls is what matters."""
    training = Training.build()
    training.save(tmp_path)
    old = Manifest.read(tmp_path).data
    calls: list[tuple[str, str]] = []
    fsync, replace, remove = os.fsync, os.replace, checkpoint_directory.shutil.rmtree

    def note_fsync(descriptor: int) -> None:
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        calls.append(("replace", Path(target).name))
        replace(source, target)

    def note_remove(path: Path, *args: object, **keywords: object) -> None:
        calls.append(("remove", Path(path).name))
        remove(path)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(checkpoint_directory.shutil, "rmtree", note_remove)
    training.save(tmp_path)
    manifest = Manifest.read(tmp_path)
    switch = calls.index(("replace", "checkpoint.json"))
    synced = {name for call, name in calls[:switch] if call == "fsync"}
    (temporary,) = [name for name in synced if name.startswith("checkpoint.json.")]
    assert synced >= {*manifest.files, manifest.data, temporary, tmp_path.name}
    after = calls[switch + 1 :]
    assert after.index(("fsync", tmp_path.name)) < after.index(("remove", old))
    assert ("remove", old) not in calls[:switch]


def test_a_failing_writer_cleans_up_and_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training.build()
    training.save(tmp_path)
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(Manifest, "switch", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(recfx.CheckpointError, match=r"no space left\. The old checkpoint.*is as it was") as caught:
        training.save(tmp_path)
    assert caught.value.reason == "checkpoint_not_written"
    assert sorted(os.listdir(tmp_path)) == before
    Training.build().load(tmp_path)


def test_leftovers_make_room_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training.build()
    training.save(tmp_path)
    current = Manifest.read(tmp_path).data
    shutil.copytree(tmp_path / current, tmp_path / "data-0123456789abcdef")
    (tmp_path / "checkpoint.json.0123456789abcdef").write_text("half a mani")
    write = storage.write

    def note(folder: Path, tensors: dict[str, torch.Tensor], *group: Any) -> None:
        assert sorted(os.listdir(tmp_path)) == ["checkpoint.json", current]
        write(folder, tensors, *group)

    monkeypatch.setattr(storage, "write", note)
    training.save(tmp_path)
    assert Manifest.read(tmp_path).data != current


def test_a_damaged_checkpoint_can_be_written_over(tmp_path: Path) -> None:
    training = Training.build()
    training.save(tmp_path)
    (tmp_path / "checkpoint.json").write_text("damaged")
    training.save(tmp_path)
    training.load(tmp_path)
    assert len(os.listdir(tmp_path)) == 2


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    names = ["data-mine", "checkpoint.json.bak", "notes.txt"]
    for name in names:
        (tmp_path / name).write_text("mine")
    training = Training.build()
    training.save(tmp_path)
    training.save(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "checkpoint.json", Manifest.read(tmp_path).data])


def test_a_second_writer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_directory, "_WAIT_SECONDS", 0.0)
    training = Training.build()
    training.save(tmp_path)
    for shared in (True, False):
        with checkpoint_directory.locked(tmp_path, shared), pytest.raises(recfx.CheckpointError) as caught:
            training.save(tmp_path)
        assert caught.value.reason == "checkpoint_busy"
    with checkpoint_directory.locked(tmp_path, shared=True):
        training.load(tmp_path)
