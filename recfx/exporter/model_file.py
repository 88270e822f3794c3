"""A file of ``export`` that is being read: what was checked is what is loaded, even if another takes its place."""

from __future__ import annotations

import contextlib
import errno
import lzma
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from recfx.errors import ExportError

_END_BYTES, _END_MARK = 22, b"PK\5\6"
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENXIO)
"""The numbers of the errors of opening a path where there is no file, or something else."""

_OF_THE_CONTENT = (zipfile.BadZipFile, EOFError, RuntimeError, ValueError, struct.error, zlib.error, lzma.LZMAError)
"""What reading a damaged archive raises."""


class ModelFile:
    """A file that stays open, and its path for messages."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self._opened = self._stamp()

    def _stamp(self) -> tuple[int, int]:
        status = os.fstat(self.file.fileno())
        return status.st_size, status.st_mtime_ns

    @contextlib.contextmanager
    def archive(self) -> Iterator[zipfile.ZipFile]:
        """The archive that the file is, from its first byte to its last one.

        Raises:
            ExportError: ``damaged_file``, ``changed_file``, also where the block reads what is not as it has to be.
        """
        try:
            self.file.seek(-_END_BYTES, os.SEEK_END)
            is_whole = self.file.read().startswith(_END_MARK)
            with zipfile.ZipFile(self.file) as archive:
                infos = archive.infolist()
                names = {info.filename for info in infos}
                is_whole = is_whole and bool(infos) and not archive.comment and len(names) == len(infos)
                if not is_whole or min(info.header_offset for info in infos) != 0:
                    raise zipfile.BadZipFile("there is something besides an archive in it, or a record is there twice")
                yield archive
        except ExportError:
            raise
        except (*_OF_THE_CONTENT, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # which codecs and seeks raise
                raise
            raise self.damaged(f"it is cut off, or was not written by recfx.export ({error})") from error

    def for_torch(self) -> str | BinaryIO:
        """What torch reads the open file by: a name if there is one, because it would copy a file without one."""
        name = f"/proc/self/fd/{self.file.fileno()}"
        self.file.seek(0)
        return name if os.path.exists(name) else self.file

    def check_unchanged(self) -> None:
        """Check that nobody has written to the file since it was opened.

        Raises:
            ExportError: ``changed_file``.
        """
        if self._stamp() != self._opened:
            raise ExportError(
                f"{self.path} was written to while it was being loaded.",
                reason="changed_file",
                what_to_do="write another file and rename it, as recfx.export does; then load it.",
            )

    def damaged(self, why: str) -> ExportError:
        """The error that says that the content is not what ``export`` has written.

        Raises:
            ExportError: ``changed_file``, if that is why.
        """
        self.check_unchanged()
        return ExportError(
            f"{self.path} cannot be loaded: {why}.",
            reason="damaged_file",
            what_to_do="export the model again, or copy the file again.",
        )


@contextlib.contextmanager
def open_model_file(path: Path) -> Iterator[ModelFile]:
    """Open a file. Whatever keeps this process from reading it, wherever that is noticed, is not blamed on the file.

    Raises:
        ExportError: ``no_file``, ``cannot_read``, ``out_of_memory``.
    """
    try:
        with open(path, "rb", opener=_open) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _no_file(path)
            yield ModelFile(path, file)
    except MemoryError as error:
        raise out_of_memory(path) from error
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _no_file(path) from error
        raise cannot_read(path, error.strerror or str(error)) from error


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe must not wait


def _no_file(path: Path) -> ExportError:
    return ExportError(f"{path} is not a file.", reason="no_file", what_to_do="export a model to it first.")


def cannot_read(path: Path, why: str) -> ExportError:
    """The error of a file that the system does not let this process read, whatever is in it."""
    return ExportError(
        f"{path} cannot be read: {why}.",
        reason="cannot_read",
        what_to_do="look for the cause in the system, not in the file: permissions, open files, the disk.",
    )


def out_of_memory(path: Path) -> ExportError:
    """The error of a file that is too large for the memory that is left, of the host or of a device."""
    return ExportError(
        f"there is too little memory to load {path}.",
        reason="out_of_memory",
        what_to_do="free memory, or export the model with quantize='int8', which takes about a quarter.",
    )
