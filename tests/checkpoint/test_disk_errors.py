"""What save_checkpoint and load_checkpoint say when the disk fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

import recfx
from recfx.checkpoint import manifest, model_plan, save, storage
from tests.checkpoint.training import OnePart, Training, assert_same


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
        with pytest.raises(recfx.CheckpointError) as caught:
            build().save(path)
        assert caught.value.reason == "checkpoint_not_written"
        assert str(path) in caught.value.message
    monkeypatch.setattr(save, "check_writable", fail)
    with pytest.raises(recfx.CheckpointError, match="No space left on device"):
        build().save(tmp_path / "d")
    assert os.listdir(tmp_path / "d") == []


def test_a_disk_that_is_full_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP wraps the error in an exception that is none of ``Exception``."""
    build().save(tmp_path)
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(FileSystem, "create_stream", fail)
    with pytest.raises(recfx.CheckpointError, match=r"No space left.*The old checkpoint.*is as it was") as caught:
        build(3).save(tmp_path)
    assert caught.value.reason == "checkpoint_not_written"
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
    with pytest.raises(recfx.CheckpointError, match="The new checkpoint is complete"):
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
        monkeypatch.setattr(manifest, "_content", fail)
    else:
        monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(recfx.CheckpointError, match=r"No space left.*Nothing was loaded") as caught:
        training.load(tmp_path)
    assert caught.value.reason == "checkpoint_unreadable"
    assert_same(training.everything(), before)


def test_a_disk_that_fails_when_weights_are_read_into_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build().save(tmp_path)
    monkeypatch.setattr(model_plan, "IN_PLACE_BYTES", 0)
    read_into = storage.read_into

    def reading(folder: Path, targets: dict[str, torch.Tensor]) -> None:
        if any("embedding_bags" in name for name in targets):
            fail()
        read_into(folder, targets)

    monkeypatch.setattr(storage, "read_into", reading)
    with pytest.raises(recfx.CheckpointError, match="may hold a mixture") as caught:
        build(3).load(tmp_path)
    assert caught.value.reason == "checkpoint_unreadable"
