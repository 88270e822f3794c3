"""Writes the big buffers of a program into its file, after TorchScript has saved it.

TorchScript saves a program whose big buffers are allocated but were never written: they take no memory, and become
records of zeros. Their content is then written over these records, piece by piece, which needs memory for one piece.
The zip format keeps a checksum of every record, which is written again as well.
"""

from __future__ import annotations

import struct
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

_MARK_BYTES = 16


@dataclass(frozen=True)
class Record:
    """Where the content of a buffer is in a file.

    Args:
        name: the record's name in the archive.
        begin: its first byte in the file.
        size: its bytes.
    """

    name: str
    begin: int
    size: int


def mark(buffer: torch.Tensor) -> bytes:
    """Write a mark at the beginning of a buffer, by which its record is found in the file.

    Args:
        buffer: uint8 ``[n]`` of at least 16 bytes.
    """
    found = uuid.uuid4().bytes
    buffer[:_MARK_BYTES] = torch.frombuffer(bytearray(found), dtype=torch.uint8)
    return found


def find_records(path: Path, marks: list[bytes], manifest: str) -> list[Record]:
    """The record that begins with each mark, and then the one whose name ends with ``manifest``."""
    found: dict[bytes, Record] = {}
    of_manifest: list[Record] = []
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size < _MARK_BYTES:
                continue
            begin = _content_begin(file, info)
            file.seek(begin)
            record = Record(info.filename, begin, info.file_size)
            found[file.read(_MARK_BYTES)] = record
            if info.filename.endswith(manifest):
                of_manifest.append(record)
    return [found[each] for each in marks] + of_manifest


def _content_begin(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    file.seek(info.header_offset + 26)  # the lengths of the name and of the extra field in the local header
    name, extra = struct.unpack("<HH", file.read(4))
    return int(info.header_offset) + 30 + int(name) + int(extra)


def overwrite(file: BinaryIO, record: Record, pieces: Iterator[memoryview]) -> int:
    """Write the content of a record, and return its CRC-32.

    Args:
        file: open for reading and writing.
        record: the record, whose size does not change.
        pieces: its content.
    """
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
    """Write the CRC-32 of changed records into the archive's directory, and behind the records.

    Args:
        path: the file.
        checksums: by the record's name.
    """
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
            found = file.read(name).decode()
            if found in checksums:
                file.seek(entry + 16)
                file.write(struct.pack("<I", checksums[found]))
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
        text: what it holds besides, which is part of the content.
    """
    records = sorted((info.filename, info.CRC) for info in archive.infolist())
    crc = zlib.crc32(text.encode())
    for name, of_record in records:
        if not name.endswith((manifest, ".debug_pkl")):
            crc = zlib.crc32(f"{name}\n{of_record:08x}\n".encode(), crc)
    return crc
