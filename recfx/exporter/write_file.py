"""Writes a program into a file: what is small with torch, and the big buffers piece by piece afterwards.

torch saves a program whose big buffers are allocated but were never written: they take no memory, and become records of
zeros. Their content is then written over these records, which needs memory for one piece. The zip format keeps a
checksum of every record, which is written again as well.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from tqdm import tqdm

from recfx.errors import ExportError
from recfx.exporter.buffers import Filling
from recfx.kernels.build.private_files import new_file

_MARK_BYTES = 16


@dataclass(frozen=True)
class Record:
    """Where the content of a buffer is in a file: the record's name, its first byte and its bytes."""

    name: str
    begin: int
    size: int


def mark(buffer: torch.Tensor) -> bytes:
    """Write a mark at the beginning of a buffer of bytes, by which its record is found in the file."""
    marked = uuid.uuid4().bytes
    buffer[:_MARK_BYTES] = torch.frombuffer(bytearray(marked), dtype=torch.uint8)
    return marked


def find_records(path: Path, marks: list[bytes], manifest: str) -> list[Record]:
    """The record that begins with each mark, and then the one whose name ends with ``manifest``."""
    by_mark: dict[bytes, Record] = {}
    of_manifest: list[Record] = []
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size < _MARK_BYTES:
                continue
            begin = _content_begin(file, info)
            file.seek(begin)
            record = Record(info.filename, begin, info.file_size)
            by_mark[file.read(_MARK_BYTES)] = record
            if info.filename.endswith(manifest):
                of_manifest.append(record)
    return [by_mark[key] for key in marks] + of_manifest


def _content_begin(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    file.seek(info.header_offset + 26)  # the lengths of the name and of the extra field in the local header
    name, extra = struct.unpack("<HH", file.read(4))
    return int(info.header_offset) + 30 + int(name) + int(extra)


def overwrite(file: BinaryIO, record: Record, pieces: Iterator[memoryview]) -> int:
    """Write the content of a record, whose size does not change, and return its CRC-32."""
    crc, size = 0, 0
    file.seek(record.begin)
    for piece in pieces:
        file.write(piece)
        crc = zlib.crc32(piece, crc)
        size += len(piece)
    if size != record.size:
        raise AssertionError(f"record {record.name} has {record.size} bytes, not {size}")
    return crc


def correct_checksums(path: Path, checksums: dict[str, int]) -> None:
    """Write the CRC-32 of changed records, by their names, into the archive's directory and behind the records."""
    with zipfile.ZipFile(path) as archive:
        begin, infos = archive.start_dir, archive.infolist()
    with path.open("r+b") as file:
        for info in infos:
            if info.filename in checksums:
                _correct_record(file, info, checksums[info.filename])
        file.seek(begin)
        for _ in infos:
            entry = file.tell()
            header = file.read(46)
            name, extra, comment = struct.unpack("<HHH", header[28:34])
            record = file.read(name).decode()
            if record in checksums:
                file.seek(entry + 16)
                file.write(struct.pack("<I", checksums[record]))
            file.seek(entry + 46 + name + extra + comment)


def _correct_record(file: BinaryIO, info: zipfile.ZipInfo, crc: int) -> None:
    if info.flag_bits & 0x8:  # the checksum is in a descriptor behind the content
        file.seek(_content_begin(file, info) + info.file_size)
        position = file.tell()
        has_signature = file.read(4) == b"PK\x07\x08"
        file.seek(position + 4 * has_signature)
    else:
        file.seek(info.header_offset + 14)
    file.write(struct.pack("<I", crc))


def content_checksum(archive: zipfile.ZipFile, manifest: str, text: str) -> int:
    """The CRC-32 of what is in a file, whatever the order of its records: of their names and checksums.

    TorchScript's debug records do not count, which name the sources that it compiled: a file may be used without them.

    Args:
        archive: the file, whose checksums are right.
        manifest: the end of the name of the record that is left out, because it holds the result.
        text: what that record holds besides, which is part of the content.
    """
    records = sorted((info.filename, info.CRC) for info in archive.infolist())
    crc = zlib.crc32(text.encode())
    for name, of_record in records:
        if not name.endswith((manifest, ".debug_pkl")):
            crc = zlib.crc32(f"{name}\n{of_record:08x}\n".encode(), crc)
    return crc


SMALL = 2**16
"""Buffers of fewer bytes are filled in memory."""


MANIFEST = "recfx.json"
"""The name of the manifest among the extra files of the archive."""

MANIFEST_RECORD = f"/extra/{MANIFEST}"
"""The end of the name of the manifest's record."""


ARCHIVE_BYTES = 2**20
"""More than an archive takes beyond what is in it: names, and the space up to the next multiple of 64 bytes."""


def reserve(path: Path, size: int) -> None:
    """Make a file of this size and no content, so that a disk without room for it is an ``OSError`` here.

    torch ends the whole process if the disk is full while it writes an archive.
    """
    with path.open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # file systems that do not support this
                raise


def write_file(
    save: Callable[[Path, str], None],
    fillings: list[Filling],
    make_manifest: Callable[[dict[str, int], int], str],
    path: Path,
    show_progress: bool,
) -> dict[str, Record]:
    """Save a program with all its content, and return where the big buffers are that were not filled in memory.

    Args:
        save: saves the program as it is, with the text of the manifest.
        fillings: its big buffers.
        make_manifest: makes the manifest, always of the same length, given the CRC-32 of each big buffer by name and
            the CRC-32 of the content, which ``content_checksum`` computes from a manifest with 0 in its place.
        path: the file to write.
        show_progress: whether to show a bar, if there is a terminal.
    """
    crcs = dict.fromkeys((filling.name for filling in fillings), 0)
    late = [filling for filling in fillings if filling.buffer.nbytes >= SMALL]
    for filling in fillings:
        if filling.buffer.nbytes < SMALL:
            filling.fill()
            crcs[filling.name] = zlib.crc32(memory_of(filling.buffer.view(-1).view(torch.uint8)))
    marks = [mark(filling.buffer.view(-1).view(torch.uint8)) for filling in late]
    save(path, make_manifest(crcs, 0))
    *records, of_manifest = find_records(path, marks, MANIFEST_RECORD)
    changed: dict[str, int] = {}
    total = sum(filling.buffer.nbytes for filling in late)
    with (
        path.open("r+b") as file,
        tqdm(total=total, desc="export", unit="B", unit_scale=True, disable=None if show_progress else True) as bar,
    ):
        for filling, record in zip(late, records, strict=True):
            crcs[filling.name] = changed[record.name] = overwrite(file, record, _pieces(filling, bar))
    correct_checksums(path, changed)
    with zipfile.ZipFile(path) as archive:
        content = content_checksum(archive, MANIFEST_RECORD, make_manifest(crcs, 0))
    manifest = make_manifest(crcs, content).encode()
    with path.open("r+b") as file:
        crc = overwrite(file, of_manifest, iter([memoryview(manifest)]))
    correct_checksums(path, {of_manifest.name: crc})
    return {filling.name: record for filling, record in zip(late, records, strict=True)}


def _pieces(filling: Filling, bar: tqdm[None]) -> Iterator[memoryview]:
    for data in filling.bytes():
        bar.update(data.numel())
        yield memory_of(data)


def memory_of(data: torch.Tensor) -> memoryview:
    """The memory of a tensor on the host, which is copied only if it is not contiguous."""
    array: Any = data.contiguous().numpy()
    return memoryview(array)


def read_in_place(path: Path, records: dict[str, Record], fillings: list[Filling]) -> dict[str, torch.Tensor]:
    """The content of a file's big buffers, which takes memory only where it is read."""
    contents = {}
    for filling in fillings:
        record = records.get(filling.name)
        if record is not None:
            content = numpy.memmap(path, mode="c", offset=record.begin, shape=(record.size,))
            contents[filling.name] = torch.from_numpy(content).view(filling.buffer.dtype).view(filling.buffer.shape)
    return contents


# Whether there can be a file, and what is said if the disk fails


def as_path(path: object) -> Path:
    """The path of a file.

    Raises:
        ExportError: ``invalid_argument``.
    """
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str) or not name or not _is_utf8(name):
        raise ExportError(
            f"path is {path!r}, which cannot be the name of a file.",
            reason="invalid_argument",
            what_to_do="pass the path of the file, as a str or a pathlib.Path.",
        )
    return Path(name)


def _is_utf8(path: str) -> bool:
    """Whether torch can open it: file names may hold other bytes, which Python gives as surrogates."""
    try:
        return b"\0" not in path.encode()
    except UnicodeEncodeError:
        return False


def destination(target: Path) -> Path:
    """The file that is written for a path: for a symbolic link, the file that it names, as ``open`` would."""
    return Path(os.path.realpath(target))


def check_target(target: Path) -> None:
    """Check that a file can be written, before anything is computed for it.

    Raises:
        ExportError: ``cannot_write``: it is a directory or a device, or no file can be made where it is.
    """
    with disk_errors(target):
        place = destination(target)
        if place.is_dir() or not target.name:
            raise _cannot_write(target, "it is a directory", "pass the path of a file.")
        if place.exists() and not place.is_file():  # renaming a file to it would remove a device such as /dev/null
            raise _cannot_write(target, "it is not a regular file", "pass the path of a file.")
        if not place.parent.is_dir():
            there = "is not a directory" if place.parent.exists() else "does not exist"
            parent = target.parent if not target.is_symlink() else place.parent
            raise _cannot_write(target, f"{parent} {there}", "create the directory, or pass another path.")
        with new_file(place):
            pass


@contextlib.contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn errors of the disk into one that names the file.

    Raises:
        ExportError: ``cannot_write``.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise _cannot_write(target, why, "make room, or pass a path where files can be written.") from error


def _cannot_write(target: Path, why: str, what_to_do: str) -> ExportError:
    free = ""
    with contextlib.suppress(OSError):
        free = f" ({shutil.disk_usage(target.parent).free} bytes are free there)"
    return ExportError(
        f"{target} cannot be written: {why}{free}. A file that was there before is as it was.",
        reason="cannot_write",
        what_to_do=what_to_do,
    )
