"""Where an exported file cannot be written, or is not: one clear error, and nothing is left behind."""

import errno
import inspect
import os
import stat
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

import recfx
from recfx import kernels, lowering
from recfx.exporter import export, model_file, served_collection
from tests.exporter.hashed_models import call, trained
from tests.support.forked_script import run_script
from tests.support.forkserver import forkserver
from tests.support.refusals import refused


def fail(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", "it is not a regular file"),
        ("nowhere/model.pt", "No such file or directory"),
        ("file/model.pt", "Not a directory"),
        ("link", "No such file or directory"),
        ("pipe", "it is not a regular file"),
        (f"{'x' * 300}.pt", "File name too long"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_anything_is_computed(
    path: str, message: str, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere/model.pt")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(export, "convert", lambda *_, **__: pytest.fail("computed"))
    with refused("cannot_write", match=message, error=recfx.ExportError) as raised:
        recfx.export(model, tmp_path / path, call(6))
    assert str(tmp_path) in raised.value.message
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "link", "pipe"]


def test_a_symbolic_link_stays_and_its_file_is_replaced(model: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "model.pt").write_text("old")
    (tmp_path / "latest.pt").symlink_to("files/model.pt")
    report = recfx.export(model, tmp_path / "latest.pt", call(6))
    assert report.path == tmp_path / "latest.pt"
    assert (tmp_path / "latest.pt").is_symlink()
    assert recfx.load(tmp_path / "files" / "model.pt").manifest == recfx.load(report.path).manifest
    assert [file.name for file in (tmp_path / "files").iterdir()] == ["model.pt"]


@pytest.mark.parametrize("path", [None, 3, "", "a\0b", b"model.pt", "a\udc80"])
def test_what_is_no_path(path: Any, model: nn.Module) -> None:
    with refused("invalid_argument", match="path is", error=recfx.ExportError):
        recfx.export(model, path, call(6))


def _torch_fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "[enforce fail at inline_container.cc:920] . PytorchStreamWriter failed writing file data/2\nmore"
    )


@pytest.mark.parametrize(
    ("where", "name", "failure", "message"),
    [
        (torch.jit, "save", _torch_fails, "failed writing file data/2"),
        (served_collection, "reserve", fail, "No space left on device"),
        (os, "fsync", fail, "No space left on device"),
        (os, "replace", fail, "No space left on device"),
    ],
    ids=["torch saves", "tables", "flush", "rename"],
)
def test_a_disk_that_is_full_leaves_the_old_file(
    where: Any, name: str, failure: Any, message: str, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.pt").write_text("old")
    monkeypatch.setattr(where, name, failure)
    with refused("cannot_write", match=message, error=recfx.ExportError):
        recfx.export(model, tmp_path / "model.pt", call(6))
    assert (tmp_path / "model.pt").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.parametrize("format", ["torchscript", "pt2"])
def test_no_room_for_the_file_is_an_error_and_does_not_end_the_process(format: str, tmp_path: Path) -> None:
    """torch itself would end it: nothing is simulated here but the size of the disk."""
    (tmp_path / "model.pt").write_text("old")
    code = """if True:
        import resource, sys, torch, recfx
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        table = EmbeddingBagConfig(name="t", embedding_dim=64, num_embeddings=20_000, feature_names=["f"])
        model = recfx.convert(EmbeddingBagCollection(tables=[table]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
        sample = KeyedJaggedTensor(["f"], torch.arange(4), lengths=torch.tensor([2, 2]))
        try:
            recfx.export(model, "model.pt", sample, format=sys.argv[1])
        except recfx.ExportError as error:
            print(error)
    """
    done = run_script(code, format, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[cannot_write] model.pt cannot be written: File too large" in done.stdout
    assert (tmp_path / "model.pt").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt"]


_OURS = tuple(str(Path(package.__file__ or "").parent) for package in (recfx, kernels, lowering))


def interrupt(run: Callable[[], object], at: int = 0) -> int:
    """Raise KeyboardInterrupt at one place of ``run()``, counted from 1, or nowhere; returns how many were passed.

    Python runs signal handlers when a function begins and after calls of C functions: these are the places. Each counts
    once, however often it is passed.
    """
    seen: set[tuple[CodeType, int, str]] = set()

    def look(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event not in ("call", "c_return") or not code.co_filename.startswith(_OURS):
            return
        if code.co_flags & inspect.CO_GENERATOR:  # what is raised while one is closed goes nowhere
            return
        count = len(seen)
        seen.add((code, frame.f_lasti, event))
        if count < len(seen) == at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        run()
    except KeyboardInterrupt:
        return len(seen)
    finally:
        sys.setprofile(None)
    assert at == 0, "nothing came out of it"
    return len(seen)


def test_an_interrupt_anywhere_leaves_the_old_file_or_the_new_one(model: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_text("old")
    run = lambda: recfx.export(model, path, call(6))  # noqa: E731
    count = interrupt(run)
    new = 0
    for at in range(1, count + 1, max(1, count // 12)):
        path.write_text("old")
        assert interrupt(run, at) == at
        assert [file.name for file in tmp_path.iterdir()] == ["model.pt"], at
        if path.read_bytes() != b"old":
            recfx.load(path)
            new += 1
    assert new <= 2


def test_a_file_that_is_replaced_keeps_its_mode_and_owner(model: nn.Module, tmp_path: Path) -> None:
    path, before = tmp_path / "model.pt", os.umask(0o027)
    try:
        recfx.export(model, path, call(6))
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        for mode in (0o600, 0o444):
            path.chmod(mode)
            if os.geteuid() == 0:
                os.chown(path, 1234, 5678)
            owner = path.stat().st_uid, path.stat().st_gid
            recfx.export(model, path, call(6))
            status = path.stat()
            assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (mode, *owner)
    finally:
        os.umask(before)


def export_and_stop_while_writing(path: Path, pipe: Connection) -> None:
    """In a process of its own, which has to be killed."""
    model_file.content_checksum = lambda *_: (pipe.send("writing"), time.sleep(100))  # type: ignore[assignment]
    recfx.export(trained(), path, call(6))


def test_what_a_killed_export_leaves_is_removed_by_the_next_one_in_that_directory(
    model: nn.Module, tmp_path: Path
) -> None:
    """But not the file of an export that is running, and no other file."""
    path, context = tmp_path / "killed.pt", forkserver()
    ours, theirs = context.Pipe()
    exporting = context.Process(target=export_and_stop_while_writing, args=(path, theirs), daemon=True)
    exporting.start()
    assert ours.poll(100), "it does not write"
    assert ours.recv() == "writing"
    (left,) = tmp_path.iterdir()
    assert (left.name[:11], stat.S_IMODE(left.stat().st_mode)) == (".killed.pt.", 0o600)
    theirs = [tmp_path / name for name in (".model.pt.recfx", ".model.pt.recfx0123456789a", "model.pt.recfx0123456789")]
    for file in theirs:
        file.touch()
    recfx.export(model, tmp_path / "model.pt", call(6))
    assert left.exists()
    exporting.kill()
    exporting.join(60)
    recfx.export(model, tmp_path / "model.pt", call(6))
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "model.pt", *theirs])
