"""Writes a program into a file, with its manifest, and says what keeps a file from being written."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from recfx.errors import ExportError
from recfx.kernels.build.private_files import new_file

MANIFEST_RECORD = "/extra/recfx.json"
"""The end of the name of the manifest's record, which TorchScript takes for an extra file."""

_ARCHIVE_BYTES = 2**22
"""More than an archive takes beyond what is in it: names, and the space up to the next multiple of 64 bytes."""


def write_file(save: Callable[[Path], None], size: int, make_manifest: Callable[[int], str], path: Path) -> None:
    """Save a program, and its manifest.

    Args:
        save: saves the program.
        size: how many bytes it has, if it takes no more than that.
        make_manifest: makes the manifest from the CRC-32 of the content, which ``content_checksum`` computes from a
            manifest with 0 in its place.
        path: the file to write.
    """
    with path.open("wb") as file:  # torch ends the whole process if the disk is full while it writes an archive
        reserve(file.fileno(), size + _ARCHIVE_BYTES)
    save(path)
    with zipfile.ZipFile(path, "a") as archive:
        content = content_checksum(archive, MANIFEST_RECORD, make_manifest(0))
        directory = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{directory}{MANIFEST_RECORD}", make_manifest(content))


def reserve(descriptor: int, size: int) -> None:
    """Make room for this many bytes in a file, so that a disk without it is an ``OSError`` here."""
    try:
        os.posix_fallocate(descriptor, 0, max(1, size))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # file systems that do not support this
            raise


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


def as_path(path: object) -> Path:
    """The path of a file.

    Raises:
        ExportError: ``invalid_argument``.
    """
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    # File names may hold other bytes than UTF-8, which Python gives as surrogates, and torch cannot open.
    if not isinstance(name, str) or not name or "\0" in name or name != name.encode(errors="replace").decode():
        raise ExportError(
            f"path is {path!r}, which cannot be the name of a file.",
            reason="invalid_argument",
            what_to_do="pass the path of the file, as a str or a pathlib.Path.",
        )
    return Path(name)


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
