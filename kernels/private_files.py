"""Files and directories that nobody else can write to, and that are there as a whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnsafeError(PermissionError):
    """A file or directory is another user's, or others may write to it."""


def refuse_unsafe(path: Path) -> None:
    """Raises an ``UnsafeError`` where another user than this one and root could have written what is there.

    Raises:
        OSError: it cannot be looked at, or is not there.
    """
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise UnsafeError(f"{path} belongs to another user (uid {found.st_uid}), who may put any code there")
    if found.st_mode & _OTHERS_WRITE:
        raise UnsafeError(f"{path} can be written to by others (mode {stat.S_IMODE(found.st_mode):03o}; chmod go-w it)")


def make_private_directory(path: Path, tighten: bool = False) -> None:
    """Make a directory for this user alone, if it is not there.

    Args:
        path: of the directory.
        tighten: take away others' permission to write to one that is there and this user's.

    Raises:
        UnsafeError: it is there, and others may write to it.
        OSError: it cannot be made, or is no directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
        found = path.stat()
        if tighten and found.st_uid == os.geteuid() and found.st_mode & _OTHERS_WRITE:
            path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS_WRITE)
    refuse_unsafe(path)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, also after a crash of the machine.

    Raises:
        OSError: there is no room, say. What was there before still is.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o755)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
