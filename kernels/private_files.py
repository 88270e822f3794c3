"""Files and directories that nobody else can write to, and files that exist either completely or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnsafeError(PermissionError):
    """A file or directory belongs to another user, or others may write to it."""


def refuse_unsafe(path: Path) -> None:
    """Raise an ``UnsafeError`` if anyone but this user and root could have written the content of ``path``.

    Raises:
        UnsafeError: it belongs to another user, or others may write to it.
        OSError: it cannot be examined, or does not exist.
    """
    found = path.stat()
    if found.st_uid not in (os.geteuid(), 0):
        raise UnsafeError(f"{path} belongs to another user (uid {found.st_uid}), who may put any code there")
    if found.st_mode & _OTHERS_WRITE:
        raise UnsafeError(f"{path} can be written to by others (mode {stat.S_IMODE(found.st_mode):03o}; chmod go-w it)")


def make_private_directory(path: Path, tighten: bool = False) -> None:
    """Create a directory for this user only, if it does not exist.

    Args:
        path: the directory.
        tighten: if it exists and belongs to this user, remove others' permission to write to it.

    Raises:
        UnsafeError: it exists, and others may write to it.
        OSError: it cannot be created, or is not a directory.
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
    """Write a file so that it exists either completely or not at all, even after the machine has crashed.

    Raises:
        OSError: the disk is full, for example. The previous content of the file is still there.
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
