"""The file of an exported model: an archive of a program and its manifest, which is written, and read, as a whole."""

from __future__ import annotations

import contextlib
import errno
import os
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from recfx.errors import ExportError
from recfx.kernels.build.private_files import new_file

MANIFEST_RECORD = "/extra/recfx.json"
"""The end of the name of the manifest's record, which TorchScript takes for an extra file."""

_ARCHIVE_BYTES = 2**22
"""More than an archive takes beyond what is in it: names, and the space up to the next multiple of 64 bytes."""


@dataclass(frozen=True)
class Program:
    """A program that may become the file, whatever its format is."""

    named: Callable[..., dict[str, torch.Tensor]]  # takes the tensors and KJTs of the signature
    save: Callable[[Path], None]
    size: int  # in bytes when it is saved, or more
    operators: Collection[str]  # that it calls, such as ``aten::add``
    buffers: Callable[[], Mapping[str, torch.Tensor]]  # by name: a call may put others into their places
    graph: str
    # The path in the model of each module and tensor of a program that deltas can be applied to, by its name there.
    paths: Mapping[str, str] | None = None
    parameters: Callable[[], Mapping[str, torch.Tensor]] = dict
    attributes: Callable[[], Mapping[str, Any]] = dict  # what its modules hold besides buffers and parameters


def write_file(save: Callable[[Path], None], size: int, make_manifest: Callable[[int], str], path: Path) -> None:
    """Save a program of at most this size, and its manifest, which is made from the CRC-32 of the content; see
    ``content_checksum``.
    """
    with path.open("wb") as file:  # torch ends the whole process if the disk is full while it writes an archive
        reserve(file.fileno(), size + _ARCHIVE_BYTES)
    save(path)
    with zipfile.ZipFile(path, "a") as archive:
        content = content_checksum(archive, make_manifest(0))
        directory = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{directory}{MANIFEST_RECORD}", make_manifest(content))


def reserve(descriptor: int, size: int) -> None:
    """Make room for this many bytes in a file, so that a disk without it is an ``OSError`` here."""
    try:
        os.posix_fallocate(descriptor, 0, max(1, size))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # file systems that do not support this
            raise


def content_checksum(archive: zipfile.ZipFile, text: str) -> int:
    """The CRC-32 of what is in a file, in any order: of its records' names and checksums, but for debug records, which
    name the sources that TorchScript compiled; and of the manifest's text, with 0 in the place of the result.
    """
    crc = zlib.crc32(text.encode())
    for name, of_record in sorted((info.filename, info.CRC) for info in archive.infolist()):
        if not name.endswith((MANIFEST_RECORD, ".debug_pkl")):
            crc = zlib.crc32(f"{name}\n{of_record:08x}\n".encode(), crc)
    return crc


def as_path(path: object, argument: str = "path") -> Path:
    """The path of a file, passed as this argument."""
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    # File names may hold other bytes than UTF-8, which Python gives as surrogates, and torch cannot open.
    if not isinstance(name, str) or not name or "\0" in name or name != name.encode(errors="replace").decode():
        raise ExportError(
            f"{argument} is {path!r}, which cannot be the name of a file.",
            reason="invalid_argument",
            what_to_do="pass the path of the file, as a str or a pathlib.Path.",
        )
    return Path(name)


def destination(target: Path) -> Path:
    """The file that is written for a path: for a symbolic link, the file that it names, as ``open`` would."""
    return Path(os.path.realpath(target))


def check_target(target: Path) -> None:
    """Check that a file can be written, before anything is computed for it (``cannot_write``)."""
    with disk_errors(target):
        place = destination(target)
        if not target.name or (place.exists() and not place.is_file()):  # a device such as /dev/null would be removed
            raise OSError("it is not a regular file")
        with new_file(place):
            pass


@contextlib.contextmanager
def disk_errors(target: Path) -> Iterator[None]:
    """Turn errors of the disk into one that names the file."""
    try:
        yield
    except OSError as error:
        raise ExportError(
            f"{target} cannot be written: {error.strerror or error}. A file that was there before is as it was.",
            reason="cannot_write",
            what_to_do="make room, or pass a path where files can be written.",
        ) from error


@dataclass(frozen=True)
class ModelFile:
    """A file that stays open while it is read: what was checked is loaded, even if another takes its place."""

    path: Path
    file: BinaryIO

    @contextlib.contextmanager
    def archive(self) -> Iterator[zipfile.ZipFile]:
        """The archive that the file is."""
        try:
            with zipfile.ZipFile(self.file) as archive:
                yield archive
        except (ExportError, MemoryError):
            raise
        except Exception as error:  # of the codecs, and of what zipfile reads
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # which codecs and seeks raise
                raise
            raise self.damaged(f"it is cut off, or was not written by recfx.export ({error})") from error

    def for_torch(self) -> str | BinaryIO:
        """What torch reads the open file by: a name if there is one, because it would copy a file without one."""
        name = f"/proc/self/fd/{self.file.fileno()}"
        self.file.seek(0)
        return name if os.path.exists(name) else self.file

    def damaged(self, why: str) -> ExportError:
        """The error that says that the content is not what ``export`` has written."""
        return ExportError(
            f"{self.path} cannot be loaded: {why}.",
            reason="damaged_file",
            what_to_do="export the model again, or copy the file again.",
        )


@contextlib.contextmanager
def open_model_file(path: Path) -> Iterator[ModelFile]:
    """Open a file. Whatever keeps this process from reading it, wherever that is noticed, is not blamed on the file."""
    try:
        if not path.is_file():
            raise ExportError(f"{path} is not a file.", reason="no_file", what_to_do="export a model to it first.")
        with path.open("rb") as file:
            yield ModelFile(path, file)
    except OSError as error:
        raise ExportError(
            f"{path} cannot be read: {error.strerror or error}.",
            reason="cannot_read",
            what_to_do="look for the cause in the system, not in the file: permissions, open files, the disk.",
        ) from error
