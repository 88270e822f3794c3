"""Tensors in a data folder: any part of them is read into any tensor, and what could not be loaded is not indexed."""

from __future__ import annotations

import hashlib
import itertools
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import recfx
from recfx.checkpoint import saved_folder, storage
from recfx.checkpoint.manifest import Manifest
from recfx.checkpoint.saved_folder import SavedFolder
from recfx.checkpoint.storage import Parts
from tests.support.refusals import refused

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


def manifest_of(directory: Path) -> Manifest:
    return Manifest.of_folder(directory / "data-0123456789abcdef")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SavedFolder]:
    cut = Parts((4, 6)).put((0, 2), CUT[:, 2:]).put((0, 0), CUT[:, :2])
    path = tmp_path / "data-0123456789abcdef"
    storage.write_index(path, storage.write(path, {**TENSORS, "cut": cut}))
    opened = SavedFolder(tmp_path, manifest_of(tmp_path))
    opened.verify()
    yield opened
    opened.close()


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
@pytest.mark.parametrize("piece", [1 << 26, 48, 1], ids=["at_once", "in_pieces", "row_by_row"])
def test_any_part_is_read(folder: SavedFolder, monkeypatch: pytest.MonkeyPatch, name: str, piece: int) -> None:
    """Also if the disk gives a few bytes at a time."""
    monkeypatch.setattr(saved_folder, "_PIECE", piece)
    preadv = os.preadv
    if piece == 1:
        monkeypatch.setattr(os, "preadv", lambda file, into, begin: preadv(file, [into[0][:9]], begin))
    saved = whole(name)
    for offsets, lengths in rectangles(saved.shape):
        expected = saved[tuple(slice(begin, begin + length) for begin, length in zip(offsets, lengths, strict=True))]
        for target in targets(lengths, saved.dtype):
            version = target._version
            parts = Parts(tuple(saved.shape)).put(offsets, target)
            storage.read_into(folder, {name: parts})
            assert torch.equal(target, expected.to(target.dtype)), (offsets, lengths)
            assert target._version > version or not target.numel()  # autograd knows


@pytest.mark.parametrize("mode", ["inference", "default_device", "default_dtype"])
def test_whatever_the_callers_modes_are(folder: SavedFolder, mode: str) -> None:
    if mode == "default_dtype":
        torch.set_default_dtype(torch.float64)
    with torch.inference_mode(mode == "inference"), torch.device("meta" if mode == "default_device" else "cpu"):
        described = storage.describe(folder)
        loaded = storage.read(folder, described)
        columns = torch.empty(7, 2, dtype=torch.float32, device="cpu")
        storage.read_into(folder, {"table": Parts((7, 5)).put((0, 3), columns)})
    assert torch.equal(columns, TENSORS["table"][:, 3:])
    for name, value in loaded.items():
        assert described[name].is_meta
        assert value.device.type == "cpu"
        assert value.dtype == described[name].dtype == whole(name).dtype
        assert torch.equal(value, whole(name)), name


def test_another_shape_is_an_error_of_ours(folder: SavedFolder) -> None:
    with pytest.raises(ValueError, match=r"table was saved as \(7, 5\), not \(5, 7\)"):
        storage.read_into(folder, {"table": torch.empty(5, 7)})


def test_a_file_that_becomes_shorter(folder: SavedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match="a file became shorter while it was read"):
        storage.read(folder, storage.describe(folder))


def test_one_byte_at_a_time(folder: SavedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, into, begin: preadv(file, [into[0][:1]], begin))
    loaded = storage.read(folder, {"ids": storage.describe(folder)["ids"]})["ids"]
    assert torch.equal(loaded, TENSORS["ids"])


def test_saving_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        storage.write(tmp_path / "data", {"a": torch.ones(2)})
        monkeypatch.setattr(storage, "save", lambda *_, **__: warnings.warn("another", stacklevel=1))
        storage.write(tmp_path / "data", {})
    assert [str(warning.message) for warning in caught] == ["another"]


def test_a_file_that_another_rank_has_not_written_here(tmp_path: Path) -> None:
    metadata = storage.write(tmp_path / "data", {"a": torch.ones(2)})
    (tmp_path / "data" / "__0_0.distcp").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"__0_0\.distcp of another rank is not in .*must be shared"):
        storage.write_index(tmp_path / "data", metadata)
    assert not (tmp_path / "data" / "tensors.json").exists()


def test_what_could_not_be_loaded_is_not_indexed(tmp_path: Path) -> None:
    """Only tables are cut into parts."""
    parts = Parts((2, 2, 2)).put((0, 0, 0), torch.ones(1, 2, 2)).put((1, 0, 0), torch.ones(1, 2, 2))
    metadata = storage.write(tmp_path / "data", {"a": parts})
    with pytest.raises(ValueError, match="the parts of tensor 'a' do not make it up"):
        storage.write_index(tmp_path / "data", metadata)
    assert not (tmp_path / "data" / "tensors.json").exists()


def torn(folder: SavedFolder) -> str:
    with refused("checkpoint_torn", error=recfx.CheckpointError) as caught:
        _ = folder.tensors
    return caught.value.message


def test_an_index_that_the_manifest_does_not_name(tmp_path: Path, folder: SavedFolder) -> None:
    manifest = manifest_of(tmp_path)
    del manifest.files["tensors.json"]
    opened = SavedFolder(tmp_path, manifest)
    assert "tensors.json is damaged: the manifest does not name it" in torn(opened)
    opened.close()


def test_an_index_of_any_size(tmp_path: Path, folder: SavedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    size = manifest_of(tmp_path).files["tensors.json"][0]
    monkeypatch.setattr(saved_folder, "_MOST_INDEX_BYTES", size - 1)
    assert f"it has {size} bytes, more than save_checkpoint ever writes" in torn(folder)
    monkeypatch.setattr(saved_folder, "_MOST_INDEX_BYTES", size)
    assert folder.tensors.keys() == {*TENSORS, "cut"}


def test_an_index_that_was_changed_and_looks_as_before(tmp_path: Path, folder: SavedFolder) -> None:
    path = tmp_path / "data-0123456789abcdef" / "tensors.json"
    times, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b'"table"', b'"tabby"'))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "its checksum is wrong" in torn(folder)


def test_files_of_another_size(tmp_path: Path) -> None:
    path = tmp_path / "data-0123456789abcdef"
    storage.write_index(path, storage.write(path, {"a": torch.ones(2)}))
    manifest = manifest_of(tmp_path)
    size = manifest.files["__0_0.distcp"][0]
    with open(path / "__0_0.distcp", "ab") as file:
        file.write(b"\0")
    opened = SavedFolder(tmp_path, manifest)
    with pytest.raises(recfx.CheckpointError, match=f"it has {size + 1} bytes instead of {size}"):
        opened.verify()
    content = (path / "__0_0.distcp").read_bytes()[:-1]
    (path / "__0_0.distcp").write_bytes(b"\1" + content[1:])
    with pytest.raises(recfx.CheckpointError, match="its checksum is wrong"):
        opened.verify()
    (path / "__0_0.distcp").write_bytes(content)
    assert hashlib.sha256(content).hexdigest() == manifest.files["__0_0.distcp"][1]
    opened.verify()
    opened.close()


def test_a_folder_that_the_disk_does_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise PermissionError("not yours")

    with pytest.raises(recfx.CheckpointError, match="it is missing or not a directory"):
        SavedFolder(tmp_path, Manifest("data-0123456789abcdef", {}))
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(PermissionError, match="not yours"):
        SavedFolder(tmp_path, Manifest("data-0123456789abcdef", {}))
