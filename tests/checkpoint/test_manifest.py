"""``checkpoint.json``: what it must be to be believed, and whose it is when it is damaged."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest

import recfx
from recfx.checkpoint import manifest as manifest_module
from recfx.checkpoint.manifest import Manifest, digest_of, is_foreign, open_regular
from tests.checkpoint.crafted import manifest_of, seal

MANIFEST = Manifest("data-0123456789abcdef", {"tensors.json": (0, "0" * 64), "__0_0.distcp": (12, "a" * 64)})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    MANIFEST.switch(tmp_path, "checkpoint.json.0123456789abcdef")
    return tmp_path


def refused(directory: Path) -> recfx.CheckpointError:
    with pytest.raises(recfx.CheckpointError) as caught:
        Manifest.read(directory)
    return caught.value


def test_what_is_written_is_read(directory: Path) -> None:
    assert Manifest.read(directory) == MANIFEST
    assert os.listdir(directory) == ["checkpoint.json"]
    assert manifest_of(directory) == {
        "format": "recfx",
        "version": 2,
        "data": "data-0123456789abcdef",
        "files": {
            "tensors.json": {"bytes": 0, "sha256": "0" * 64},
            "__0_0.distcp": {"bytes": 12, "sha256": "a" * 64},
        },
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": "other"}, "it is not a manifest of recfx"),
        ({"format": None}, "it is not a manifest of recfx"),
        ({"version": "2"}, "it is not a manifest of recfx"),
        ({"version": True}, "it is not a manifest of recfx"),
        ({"version": 2.0}, "it is not a manifest of recfx"),
        ({"data": None}, "it names files"),
        ({"data": ["data-0123456789abcdef"]}, "it names files"),
        ({"data": "data-0123456789abcde"}, "it names files"),
        ({"data": "data-0123456789abcdef/.."}, "it names files"),
        ({"data": "../data-0123456789abcdef"}, "it names files"),
        ({"files": None}, "it names files"),
        ({"files": []}, "it names files"),
    ],
)
def test_what_is_no_manifest(directory: Path, changed: dict[str, Any], message: str) -> None:
    seal(directory, {**manifest_of(directory), **changed})
    error = refused(directory)
    assert error.reason == "checkpoint_torn"
    assert message in error.message
    assert "nothing was loaded" in error.what_to_do


@pytest.mark.parametrize("content", [[], 1, "recfx", None])
def test_what_is_no_dict(directory: Path, content: Any) -> None:
    seal(directory, content)
    assert "it is not a manifest of recfx" in refused(directory).message


@pytest.mark.parametrize("name", ["a/b", ".", "..", "", "x" * 201, "a b", "a\n", "ä"])
def test_names_that_are_no_file_in_the_folder(directory: Path, name: str) -> None:
    seal(directory, {**manifest_of(directory), "files": {name: {"bytes": 1, "sha256": "0" * 64}}})
    assert "it names files that do not belong to a checkpoint" in refused(directory).message


@pytest.mark.parametrize(
    "entry",
    [
        [], None, {}, {"bytes": 1}, {"sha256": "0" * 64}, {"bytes": -1, "sha256": "0" * 64},
        {"bytes": True, "sha256": "0" * 64}, {"bytes": 1.0, "sha256": "0" * 64}, {"bytes": "1", "sha256": "0" * 64},
        {"bytes": 1, "sha256": 7}, {"bytes": 1, "sha256": None}, {"bytes": 1, "sha256": "0" * 63},
        {"bytes": 1, "sha256": "0" * 65}, {"bytes": 1, "sha256": "A" * 64},
    ],
)  # fmt: skip
def test_entries_that_are_no_size_and_checksum(directory: Path, entry: Any) -> None:
    seal(directory, {**manifest_of(directory), "files": {"a": entry}})
    assert "it names files that do not belong to a checkpoint" in refused(directory).message


def test_names_and_sizes_at_the_limits(directory: Path) -> None:
    seal(directory, {**manifest_of(directory), "files": {"x" * 200: {"bytes": 0, "sha256": "f" * 64}}})
    assert Manifest.read(directory).files == {"x" * 200: (0, "f" * 64)}
    seal(directory, {**manifest_of(directory), "files": {}})
    assert Manifest.read(directory).files == {}


@pytest.mark.parametrize(("version", "trust"), [(1, True), (3, False), (0, False), (-1, False)])
def test_versions(directory: Path, version: int, trust: bool) -> None:
    seal(directory, {"format": "recfx", "version": version})
    error = refused(directory)
    assert error.reason == "checkpoint_version"
    assert f"has version {version}, but this recfx reads 2" in error.message
    assert ("only if you trust" in error.what_to_do) == trust


def test_its_own_checksum(directory: Path) -> None:
    path = directory / "checkpoint.json"
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"\n", b" " + content, content.replace(b"12", b"13", 1), b""):
        path.write_bytes(damaged)
        error = refused(directory)
        assert error.reason == "checkpoint_torn"
        assert "its checksum is wrong" in error.message
    for line in (b"{", b"[" * 100_000):
        path.write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")
        assert "it is not JSON" in refused(directory).message


def test_its_size(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (directory / "checkpoint.json").stat().st_size
    monkeypatch.setattr(manifest_module, "_MOST_BYTES", size)
    assert Manifest.read(directory) == MANIFEST
    monkeypatch.setattr(manifest_module, "_MOST_BYTES", size - 1)
    assert f"it has more than {size - 1} bytes" in refused(directory).message


def test_there_is_none(tmp_path: Path) -> None:
    assert refused(tmp_path).reason == "checkpoint_missing"
    (tmp_path / "checkpoint.json").symlink_to(tmp_path / "nowhere")
    assert refused(tmp_path).reason == "checkpoint_torn"


def test_whose_it_is(directory: Path) -> None:
    """However little of it is left, one of recfx's is written over, and one of somebody else is not."""
    path = directory / "checkpoint.json"
    content = path.read_bytes()
    assert content.startswith(b'{"data": "data-')
    ours = [content, content[:5], content[:1], b"", bytes(100), content[:30] + bytes(50), content[40:], b"??" + content]
    theirs = [b"x", b'{"step": 5}', b"\0x\0", b"[]", b'{"data": "mine"}', b'{"format": "other"}']
    for content, foreign in [*((text, False) for text in ours), *((text, True) for text in theirs)]:
        path.write_bytes(content)
        assert is_foreign(directory) == foreign, content
    path.unlink()
    assert not is_foreign(directory)
    path.mkdir()
    assert is_foreign(directory)


def test_the_checksum_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "_CHUNK", 16)
    for content in (b"", b"a", bytes(range(16)), bytes(range(100))):
        path = tmp_path / "file"
        path.write_bytes(content)
        with open_regular(path) as descriptor:
            assert digest_of(descriptor) == hashlib.sha256(content).hexdigest()


def test_what_is_no_regular_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("content")
    Path("link").symlink_to("file")
    os.mkfifo("fifo")
    Path("directory").mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        for name in ("link", "fifo", "directory", "socket"):
            with pytest.raises(recfx.CheckpointError, match="it is not a regular file"), open_regular(Path(name)):
                pass
    for name in ("nothing", "file/below"):
        with pytest.raises(recfx.CheckpointError, match="it is missing"), open_regular(Path(name)):
            pass


def test_what_the_disk_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(PermissionError, match="not yours"), open_regular(tmp_path / "file"):
        pass
