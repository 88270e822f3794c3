"""The directory of a checkpoint: what is deleted in it, what the disk may refuse, and that no file in it runs code."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

import recfx
from recfx.checkpoint import directory as manifest
from recfx.checkpoint import save, storage
from recfx.checkpoint.directory import remove_leftovers
from recfx.checkpoint.storage import Parts, SavedFolder
from tests.checkpoint.crafted import Runs, change_tensors, data_of, reseal
from tests.checkpoint.training import OnePart, Training, assert_same
from tests.support.refusals import refused

OLD, KEPT = "data-0123456789abcdef", "data-fedcba9876543210"


def test_only_leftovers_of_writers_are_deleted(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "tensors.json").write_text("theirs")
    directory = tmp_path / "directory"
    for name in (OLD, KEPT, "data-1111111111111111"):
        (directory / name).mkdir(parents=True)
        for file in (".metadata", ".metadata.tmp", "tensors.json", "__0_0.distcp", "__12_3.distcp"):
            (directory / name / file).write_text("ours")
    (directory / "checkpoint.json.0123456789abcdef").write_text("ours")
    theirs = {
        "data-2222222222222222": lambda path: path.symlink_to(outside),
        "data-3333333333333333": lambda path: path.write_text("theirs"),
        "data-44444444": lambda path: path.mkdir(),
        "logs": lambda path: path.mkdir(),
        "checkpoint.json.fedcba9876543210": lambda path: path.mkdir(),
        "checkpoint.json.bak": lambda path: path.write_text("theirs"),
    }
    for name, make in theirs.items():
        make(directory / name)
    for name, make in {
        "data-5555555555555555": lambda path: (path / "tensors.json").symlink_to(outside / "tensors.json"),
        "data-6666666666666666": lambda path: (path / "tensors.json").mkdir(),
        "data-7777777777777777": lambda path: (path / "theirs").write_text("theirs"),
        "data-8888888888888888": lambda path: (path / "__0_0.distcp.bak").write_text("theirs"),
    }.items():
        (directory / name).mkdir()
        (directory / name / "__0_0.distcp").write_text("ours")
        make(directory / name)
        theirs[name] = make
    (directory / "data-9999999999999999").mkdir()  # a writer was killed before it wrote anything
    remove_leftovers(directory, keep=KEPT)
    assert set(os.listdir(directory)) == {*theirs, KEPT}
    assert (outside / "tensors.json").read_text() == "theirs"
    assert len(os.listdir(directory / KEPT)) == 5


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    model, target = nn.Linear(2, 2), nn.Linear(2, 2)
    recfx.save_checkpoint(model, tmp_path)
    recfx.load_checkpoint(target, tmp_path)
    assert torch.equal(target.weight, model.weight)


def build(seed: int = 0) -> Training:
    training = Training.build("sgd", rows=40, seed=seed, model_class=OnePart)
    training.steps(seed, seed + 1)
    return training


def fail(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_nothing_is_serialised_for_a_directory_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(storage, "write", lambda *_: pytest.fail("serialised"))
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused("checkpoint_not_written", error=recfx.CheckpointError) as caught:
            build().save(path)
        assert str(path) in caught.value.message


def test_a_disk_that_is_full_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP wraps the error in an exception that is none of ``Exception``."""
    build().save(tmp_path)
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(FileSystem, "create_stream", fail)
    with refused("checkpoint_not_written", match="No space left", error=recfx.CheckpointError) as caught:
        build(3).save(tmp_path)
    assert isinstance(caught.value.__cause__, OSError)
    assert sorted(os.listdir(tmp_path)) == before
    monkeypatch.undo()
    build().load(tmp_path)


def test_interrupting_is_no_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FileSystem, "create_stream", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build().save(tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_new_checkpoint_counts_when_the_old_one_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build().save(tmp_path)
    training = build(3)
    monkeypatch.setattr(save, "remove_leftovers", lambda path, keep: None if len(os.listdir(path)) < 3 else fail())
    with refused("checkpoint_not_written", error=recfx.CheckpointError):
        training.save(tmp_path)
    target = build()
    target.load(tmp_path)
    assert_same(dict(target.model.state_dict()), dict(training.model.state_dict()))


@pytest.mark.parametrize("place", ["manifest", "tensors"])
def test_a_disk_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    build().save(tmp_path)
    training = build(3)
    before = training.everything()
    if place == "manifest":
        monkeypatch.setattr(manifest, "_digest_of", fail)
    else:
        monkeypatch.setattr(SavedFolder, "read_into", fail)
    with refused("checkpoint_unreadable", match="No space left", error=recfx.CheckpointError):
        training.load(tmp_path)
    assert_same(training.everything(), before)


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
