"""The directory of a checkpoint: which data folder is valid, who may use it now, and what survives a crash.

``checkpoint.json``, the manifest, names the one folder ``data-<token>`` that is valid, with the size and the checksum
of every file in it. It has two lines: JSON, and the SHA-256 of the first line. It is written beside the old one and
renamed over it, so there is always one complete manifest. The checksums detect damage. They prove nothing about who
wrote the files. Everything else with one of recfx's names was left behind by a writer that was killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from recfx.errors import CheckpointError
from recfx.kernels.build.private_files import sync_directory

MANIFEST = "checkpoint.json"
DATA_NAME = re.compile(r"data-[0-9a-f]{16}")
_TEMPORARY = re.compile(r"checkpoint\.json\.[0-9a-f]{16}")
_IN_DATA = re.compile(r"\.metadata(\.tmp)?|tensors\.json|__\d+_\d+\.distcp")
_WAIT_SECONDS = 60.0
FORMAT_VERSION = 3
_CHUNK = 1 << 22
_BEGIN, _MARK = b'{"data": "data-', b'"format": "recfx"'  # a damaged manifest still contains one of these


def new_name() -> str:
    """A name for a data folder that no writer has used."""
    return f"data-{secrets.token_hex(8)}"


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
    """Lock writers out against each other and against readers. The lock leaves no file, and ends with the process."""
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
def disk_errors(reason: str, path: Path, what_to_do: str) -> Iterator[None]:
    """Turn errors of the disk, and those that DCP wraps, into a ``CheckpointError``."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        cause = cause_of(error)
        if not isinstance(cause, Exception):  # DCP also wraps Ctrl-C
            raise cause from None
        message = f"{path}: {str(cause) or type(cause).__name__}."
        raise CheckpointError(message, reason=reason, what_to_do=what_to_do) from cause


def cause_of(error: BaseException) -> BaseException:
    """The error that DCP has wrapped, or the error itself."""
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            return cause_of(failure)
        return RuntimeError(str(error))
    return error


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of: a data folder, and size in bytes and SHA-256 of every file in it, by name."""

    data: str
    files: dict[str, tuple[int, str]]

    @classmethod
    def of_folder(cls, folder: Path) -> Manifest:
        """The manifest of a folder that was just written; its files and names are on the disk when this returns."""
        files = {}
        for path in sorted(folder.iterdir()):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            files[path.name] = path.stat().st_size, _digest_of(path)
        sync_directory(folder)
        return cls(folder.name, files)

    def switch(self, directory: Path) -> None:
        """Make this the directory's manifest: before this call the old checkpoint is loaded, after it the new one."""
        entries = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        content = {"format": "recfx", "version": FORMAT_VERSION, "data": self.data, "files": entries}
        line, temporary = json.dumps(content, sort_keys=True).encode(), directory / f"{MANIFEST}.{self.data[5:]}"
        with open(temporary, "xb") as file:
            file.write(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        sync_directory(directory)  # the data folder's name, before anything refers to it
        os.replace(temporary, directory / MANIFEST)
        sync_directory(directory)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The directory's manifest; ``checkpoint_missing``, ``checkpoint_torn`` or ``checkpoint_version`` otherwise."""
        path = directory / MANIFEST
        try:
            line, _, rest = path.read_bytes().partition(b"\n")
        except (FileNotFoundError, NotADirectoryError):
            raise missing(directory) from None
        if rest != hashlib.sha256(line).hexdigest().encode() + b"\n":
            raise torn(path, "its checksum is wrong")
        try:
            parsed = json.loads(line)
            version = int(parsed["version"])
            if version != FORMAT_VERSION:
                raise CheckpointError(
                    f"the checkpoint in {directory} has version {version}, but this recfx reads {FORMAT_VERSION}.",
                    reason="checkpoint_version",
                    what_to_do="load it with the recfx that saved it.",
                )
            files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in parsed["files"].items()}
            return cls(str(parsed["data"]), files)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise torn(path, "it is not a manifest of recfx") from None

    def verify(self, directory: Path) -> None:
        """Read all files, and raise ``checkpoint_torn`` if they are not what the manifest says."""
        for name, (size, digest) in self.files.items():
            path = directory / self.data / name
            try:
                if path.stat().st_size != size:
                    raise torn(path, f"it has {path.stat().st_size} bytes instead of {size}")
                if _digest_of(path) != digest:
                    raise torn(path, "its checksum is wrong")
            except (FileNotFoundError, NotADirectoryError):
                raise torn(path, "it is missing") from None


def is_foreign(directory: Path) -> bool:
    """Whether the directory has a ``checkpoint.json`` that ``save_checkpoint`` has not written, damaged or not."""
    path = directory / MANIFEST
    if not path.is_file():
        return path.exists()
    content = path.read_bytes().strip(b"\0")  # some file systems leave zeros in a file after a power cut
    return not (_BEGIN.startswith(content[: len(_BEGIN)]) or _MARK in content)


def missing(directory: Path) -> CheckpointError:
    """The error for a directory without a checkpoint."""
    message = f"there is no finished checkpoint of save_checkpoint in {directory}."
    what_to_do = "pass the directory given to save_checkpoint."
    return CheckpointError(message, reason="checkpoint_missing", what_to_do=what_to_do)


def torn(path: Path, why: str) -> CheckpointError:
    """The error for a damaged file."""
    what_to_do = "use another checkpoint; nothing was loaded."
    return CheckpointError(f"{path} is damaged: {why}.", reason="checkpoint_torn", what_to_do=what_to_do)


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()  # not hashlib.file_digest, which Python 3.10 lacks
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
