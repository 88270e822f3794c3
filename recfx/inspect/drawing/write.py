"""Writing a picture: the whole file, or nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from recfx.errors import DrawingError
from recfx.kernels.build.private_files import new_file


def as_path(path: object) -> Path:
    """The path of a file.

    Raises:
        DrawingError: ``invalid_argument``.
    """
    found = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(found, str) or not found or "\0" in found:
        raise DrawingError(
            f"path is {path!r}, which cannot be the name of a file.",
            reason="invalid_argument",
            what_to_do="pass the path of the file, as a str or a pathlib.Path.",
        )
    return Path(found)


def write_text(path: Path, text: str) -> None:
    """Write a file, replacing one that exists in one step; a symbolic link stays.

    Raises:
        DrawingError: ``cannot_write``. A file that was there before is as it was.
    """
    if not path.parent.is_dir():
        raise _cannot_write(path, f"there is no directory {path.parent}")
    with _disk_errors(path):
        place = Path(os.path.realpath(path))
        if place.is_dir() or (place.exists() and not place.is_file()):
            raise _cannot_write(path, "it is not a regular file")
        with new_file(place) as file:
            file.path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
            file.put_in_place()


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _cannot_write(path, error.strerror or str(error)) from error


def _cannot_write(path: Path, what: str) -> DrawingError:
    return DrawingError(
        f"{path} cannot be written: {what}. A file that was there before is as it was.",
        reason="cannot_write",
        what_to_do="pass the path of a file in a directory that exists, with room for it, where you may write.",
    )
