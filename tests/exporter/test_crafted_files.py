"""Files that were made to be wrong: each is one typed error, which names the file."""

import errno
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

import recfx
from tests.exporter.changed_records import forge, rewrite
from tests.exporter.changed_records import with_manifest as with_fields


def with_manifest(file: Path, path: Path, text: str) -> Path:
    rewrite(file, path, lambda records: {n: text.encode() if "recfx.json" in n else c for n, c in records.items()})
    return path


def refused(path: Any, reason: str) -> str:
    with pytest.raises(recfx.ExportError) as raised:
        recfx.load(path)
    assert raised.value.reason == reason
    return raised.value.message


@pytest.mark.parametrize("field", ["arguments", "parameters", "returns"])
def test_a_manifest_without_what_it_needs(field: str, file: Path, tmp_path: Path) -> None:
    forge(file, tmp_path / "crafted.pt", with_fields(**{field: None}))
    refused(tmp_path / "crafted.pt", "damaged_file")


@pytest.mark.parametrize("hash_version", [1.0, True, "1" * 500])
def test_a_hash_of_another_type(hash_version: Any, file: Path, tmp_path: Path) -> None:
    manifest = {**recfx.load(file).manifest, "hash_version": hash_version}
    path = with_manifest(file, tmp_path / "crafted.pt", json.dumps(manifest))
    assert len(refused(path, "other_hash")) < len(str(path)) + 150


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        f'{{"format_version": 1{"0" * 5000}}}',
        '{"format_version": true}',
        '{"format_version": 0}',
        "null",
    ],
    ids=["too deep", "too long a number", "a bool", "no version", "nothing"],
)
def test_what_is_no_manifest(text: str, file: Path, tmp_path: Path) -> None:
    assert "has no manifest of recfx" in refused(with_manifest(file, tmp_path / "crafted.pt", text), "not_exported")


@pytest.mark.parametrize(
    ("offset", "value"), [(8, 1), (10, 99), (10, 8), (10, 12), (10, 14), (6, 64)],
    ids=["encrypted", "unknown method", "not deflated", "not bzip2", "not lzma", "later version"],
)  # fmt: skip
def test_records_that_cannot_be_unpacked(offset: int, value: int, file: Path, tmp_path: Path) -> None:
    content = bytearray(file.read_bytes())
    content[content.find(b"PK\x01\x02") + offset] = value
    (tmp_path / "crafted.pt").write_bytes(content)
    refused(tmp_path / "crafted.pt", "damaged_file")


@pytest.mark.parametrize("path", [None, 3, b"model.pt", "", "a\0b"])
def test_what_is_no_path(path: Any) -> None:
    assert "path is" in refused(path, "invalid_argument")


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    refused(tmp_path / ("x" * 300), "cannot_read")


def test_a_file_that_may_not_be_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(zipfile, "ZipFile", refuse)  # root may read everything
    assert "cannot be read: Permission denied" in refused(file, "cannot_read")


@pytest.mark.parametrize(("number", "reason"), [(errno.EIO, "cannot_read"), (errno.EINVAL, "damaged_file")])
def test_a_disk_that_cannot_be_read(number: int, reason: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(zipfile.ZipFile, "testzip", fail)
    assert os.strerror(number) in refused(file, reason)


@pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path)], ids=["dir", "pipe", "loop"]
)
def test_what_is_no_file(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "no_file")
    refused(tmp_path / "model.pt" / "below", "no_file")
