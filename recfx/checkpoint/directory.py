"""The directory of a checkpoint: who may use it now, which files in it are recfx's, and what survives a crash.

``checkpoint.json`` names the one folder ``data-<token>`` that is valid. Everything else with one of recfx's names was
left behind by a writer that was killed.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from recfx.errors import CheckpointError
from recfx.kernels.build.private_files import sync_directory

MANIFEST = "checkpoint.json"
DATA_NAME = re.compile(r"data-[0-9a-f]{16}")
_TEMPORARY = re.compile(r"checkpoint\.json\.[0-9a-f]{16}")
_IN_DATA = re.compile(r"\.metadata(\.tmp)?|tensors\.json|__\d+_\d+\.distcp")
_WAIT_SECONDS = 60.0


def new_names() -> tuple[str, str]:
    """Names that no writer has used, for a data folder and for a manifest before it is switched."""
    token = secrets.token_hex(8)
    return f"data-{token}", f"{MANIFEST}.{token}"


def make_directory(directory: Path) -> None:
    """Create the directory, and make sure that a crash does not lose it."""
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        sync_directory(directory.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file, and flush its content to the disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def remove_leftovers(directory: Path, keep: str) -> None:
    """Delete what writers have left behind, except the folder ``keep``. Files with other names are not touched."""
    for name in sorted(os.listdir(directory)):
        path = directory / name
        if _TEMPORARY.fullmatch(name) and not path.is_dir():
            path.unlink()
        elif name != keep and DATA_NAME.fullmatch(name) and _is_data(path):
            shutil.rmtree(path)


def _is_data(path: Path) -> bool:
    """Whether a folder with the name of a data folder contains only what writers put there."""
    if path.is_symlink() or not path.is_dir():
        return False
    with os.scandir(path) as entries:
        return all(_IN_DATA.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) for entry in entries)


@contextmanager
def locked(directory: Path, shared: bool) -> Iterator[None]:
    """Lock writers out against each other and against readers. The lock leaves no file, and ends with the process.

    Raises:
        CheckpointError: ``checkpoint_busy``, after a minute.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _lock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, directory)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing would not release it in processes forked meanwhile
        os.close(descriptor)


def _lock(descriptor: int, kind: int, directory: Path) -> None:
    give_up = time.monotonic() + _WAIT_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise CheckpointError(
                    f"{directory} is being read or written by another process.",
                    reason="checkpoint_busy",
                    what_to_do="try again later, or give each writer its own directory.",
                ) from None
            time.sleep(0.05)
        except OSError:  # network file systems may not lock directories; a single writer does not need it
            return None


@contextmanager
def disk_errors(reason: str, path: Path, consequence: Callable[[], str], what_to_do: str) -> Iterator[None]:
    """Turn errors of the disk, and those that DCP wraps, into a ``CheckpointError`` that says its consequence."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        cause = cause_of(error)
        if not isinstance(cause, Exception):  # DCP also wraps Ctrl-C
            raise cause from None
        message = f"{path}: {str(cause) or type(cause).__name__}. {consequence()}"
        raise CheckpointError(message, reason=reason, what_to_do=what_to_do) from cause


def cause_of(error: BaseException) -> BaseException:
    """The error that DCP has wrapped, or the error itself."""
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            return cause_of(failure)
        return RuntimeError(str(error))
    return error
