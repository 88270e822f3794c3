"""Files and directories that nobody else can write to, and files that exist either completely or not at all."""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_NEW_FILE = re.compile(r"\..+\.recfx[0-9a-f]{10}", re.DOTALL)


class UnsafeError(PermissionError):
    """A file or directory belongs to another user, or others may write to it."""


def refuse_unsafe(path: Path) -> None:
    """Raise an ``UnsafeError`` if anyone but this user and root could have written the content of ``path``.

    Raises:
        UnsafeError: it belongs to another user, or others may write to it.
        OSError: it cannot be examined, or does not exist.
    """
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise UnsafeError(f"{path} belongs to another user (uid {status.st_uid}), who may put any code there")
    if status.st_mode & _OTHERS_WRITE:
        raise UnsafeError(
            f"{path} can be written to by others (mode {stat.S_IMODE(status.st_mode):03o}; chmod go-w it)"
        )


def make_private_directory(path: Path, tighten: bool = False) -> None:
    """Create a directory for this user only, if it does not exist. If it does, and belongs to this user, ``tighten``
    removes others' permission to write to it.

    Raises:
        UnsafeError: it exists, and others may write to it.
        OSError: it cannot be created, or is not a directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(f"{path} is not a directory") from None
        status = path.stat()
        if tighten and status.st_uid == os.geteuid() and status.st_mode & _OTHERS_WRITE:
            path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
    refuse_unsafe(path)


class NewFile:
    """A file at ``path`` that is being written, in place, beside ``target``, whose place it will take."""

    def __init__(self, path: Path, target: Path, descriptor: int) -> None:
        self.path = path
        self._target = target
        self._descriptor = descriptor
        self._mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        self._set_mode(0o600)  # so that nobody reads it now who will not be allowed to

    def put_in_place(self, mode: int | None = None) -> None:
        """Flush the file to the disk, and replace the other one in one step, even if the machine crashes. By default,
        it gets the mode of the other, and its owner if this user may give files away, or else the mode of new files.

        Raises:
            OSError: the disk is full, for example. The previous file is still there.
        """
        if mode is None:
            mode = self._mode
            with contextlib.suppress(FileNotFoundError):
                replaced = self._target.stat()
                mode = stat.S_IMODE(replaced.st_mode)
                self._give_to(replaced.st_uid, replaced.st_gid)
        self._set_mode(mode)
        os.fsync(self._descriptor)
        os.replace(self.path, self._target)
        sync_directory(self._target.parent)

    def _set_mode(self, mode: int) -> None:
        with contextlib.suppress(PermissionError):  # of file systems whose files all have the same mode
            os.fchmod(self._descriptor, mode)

    def _give_to(self, user: int, group: int) -> None:
        for owner in ((user, group), (-1, group)):
            with contextlib.suppress(OSError):
                return os.fchown(self._descriptor, *owner)


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[NewFile]:
    """Make a file beside ``target`` that is gone when the block ends, unless it was put in the place of ``target``.

    Files that processes have left in the directory, because they were killed, are removed first. A process locks those
    that it writes until it ends.

    Raises:
        OSError: it cannot be made.
    """
    _remove_leftovers(target.parent)
    while True:
        path = target.with_name(f".{target.name}.recfx{secrets.token_hex(5)}")
        try:
            with path.open("xb") as file:
                with contextlib.suppress(OSError):  # of file systems without locks, where nobody else has one either
                    fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file.fileno()).st_nlink > 0:  # nobody took it for a leftover before it was locked
                    yield NewFile(path, target, file.fileno())
                    return
        finally:
            path.unlink(missing_ok=True)


def _remove_leftovers(directory: Path) -> None:
    """Delete new files that nobody has locked."""
    for path in directory.glob(".*.recfx*"):
        if _NEW_FILE.fullmatch(path.name):
            with contextlib.suppress(OSError), path.open("r+b") as file:  # it is another user's, or has just gone
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def sync_directory(directory: Path) -> None:
    """Write the names in a directory to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that do not support this
            raise
    finally:
        os.close(descriptor)
