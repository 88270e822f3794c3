"""Writes a program into a file: what is small with torch, what is big piece by piece afterwards."""

from __future__ import annotations

import errno
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from tqdm import tqdm

from recfx.exporter.archive import Record, content_checksum, correct_checksums, find_records, mark, overwrite
from recfx.exporter.buffers import Filling

SMALL = 2**16
"""Buffers of fewer bytes are filled in memory."""


MANIFEST = "recfx.json"
"""The name of the manifest among the extra files of the archive."""

MANIFEST_RECORD = f"/extra/{MANIFEST}"
"""The end of the name of its record."""


ARCHIVE_BYTES = 2**20
"""More than an archive takes beyond what is in it: names, and the space up to the next multiple of 64 bytes."""


def reserve(path: Path, size: int) -> None:
    """Make a file of this size and no content, so that a disk without room for it is noticed here.

    torch ends the whole process if the disk is full while it writes an archive.

    Raises:
        OSError: there is no room.
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
    """Save a program with all its content.

    Args:
        save: saves the program as it is, with the text of the manifest.
        fillings: its big buffers.
        make_manifest: makes the manifest, given the CRC-32 of each big buffer by name, and that of the content as
            ``content_checksum`` computes it, from the manifest with 0 in its place; always of the same length.
        path: the file to write.
        show_progress: whether to show a bar.

    Returns:
        where the big buffers are in the file, by name; those that were filled in memory are not among them.

    Raises:
        OSError: an error of the disk.
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
        tqdm(total=total, desc="export", unit="B", unit_scale=True, disable=not show_progress) as bar,
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
    """The content of a file's big buffers, which takes memory only where it is read.

    Args:
        path: the file.
        records: where the buffers are.
        fillings: the buffers.
    """
    found = {}
    for filling in fillings:
        record = records.get(filling.name)
        if record is not None:
            content = numpy.memmap(path, mode="c", offset=record.begin, shape=(record.size,))
            found[filling.name] = torch.from_numpy(content).view(filling.buffer.dtype).view(filling.buffer.shape)
    return found
