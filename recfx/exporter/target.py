"""The file that an export writes: whether there can be one, and what is said if the disk fails."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from recfx.errors import ExportError
from recfx.kernels.build.private_files import new_file


def as_path(path: object) -> Path:
    """The path of a file.

    Raises:
        ExportError: ``invalid_argument``.
    """
    found = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(found, str) or not found or not _is_utf8(found):
        raise ExportError(
            f"path is {path!r}, which cannot be the name of a file.",
            reason="invalid_argument",
            what_to_do="pass the path of the file, as a str or a pathlib.Path.",
        )
    return Path(found)


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
        what = error.strerror or str(error)
        raise _cannot_write(target, what, "make room, or pass a path where files can be written.") from error


def _cannot_write(target: Path, what: str, what_to_do: str) -> ExportError:
    free = ""
    with contextlib.suppress(OSError):
        free = f" ({shutil.disk_usage(target.parent).free} bytes are free there)"
    return ExportError(
        f"{target} cannot be written: {what}{free}. A file that was there before is as it was.",
        reason="cannot_write",
        what_to_do=what_to_do,
    )
