"""The manifest: which data folder is valid, and the size and checksum of every file in it.

It has two lines: JSON, and the SHA-256 of the first line. It is written beside the old one and renamed over it, so
there is always one complete manifest. The checksums detect damage. They prove nothing about who wrote the files, so the
contents of the manifest and of the files are checked as well.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recfx.checkpoint.directory import DATA_NAME, MANIFEST, write_durably
from recfx.errors import CheckpointError
from recfx.kernels.build.private_files import sync_directory

FORMAT_VERSION = 2  # 1 had no tensors.json: it could only be read by unpickling
_CHUNK = 1 << 22
_MOST_BYTES = 1 << 26
_FILE_NAME = re.compile(r"[A-Za-z0-9_.]{1,200}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BEGIN, _MARK = b'{"data": "data-', b'"format": "recfx"'  # a damaged manifest still contains one of these


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Args:
        data: name of the data folder.
        files: size in bytes and SHA-256 of every file in it, by name.
    """

    data: str
    files: dict[str, tuple[int, str]]

    @classmethod
    def of_folder(cls, folder: Path) -> Manifest:
        """The manifest of a folder that was just written; its files and names are on the disk when this returns."""
        files = {}
        for path in sorted(folder.iterdir()):
            with open_regular(path) as descriptor:
                os.fsync(descriptor)
                files[path.name] = os.fstat(descriptor).st_size, digest_of(descriptor)
        sync_directory(folder)
        return cls(folder.name, files)

    def switch(self, directory: Path, temporary_name: str) -> None:
        """Make this the directory's manifest: before this call the old checkpoint is loaded, after it the new one."""
        entries = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        body = json.dumps(
            {"format": "recfx", "version": FORMAT_VERSION, "data": self.data, "files": entries}, sort_keys=True
        )
        line = body.encode()
        write_durably(directory / temporary_name, line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")
        sync_directory(directory)  # the data folder's name, before anything refers to it
        os.replace(directory / temporary_name, directory / MANIFEST)
        sync_directory(directory)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The directory's manifest, its own checksum verified.

        Raises:
            CheckpointError: ``checkpoint_missing``, ``checkpoint_torn``, ``checkpoint_version``.
            OSError: an error of the disk.
        """
        path = directory / MANIFEST
        content = _content(directory)
        line, _, rest = content.partition(b"\n")
        if rest != hashlib.sha256(line).hexdigest().encode() + b"\n":
            raise torn(path, "its checksum is wrong")
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise torn(path, f"it is not JSON ({type(error).__name__})") from None
        if not isinstance(parsed, dict) or parsed.get("format") != "recfx" or type(parsed.get("version")) is not int:
            raise torn(path, "it is not a manifest of recfx")
        if parsed["version"] != FORMAT_VERSION:
            trust = ", only if you trust whoever wrote its files (version 1 can run code), and save it again"
            raise CheckpointError(
                f"the checkpoint in {directory} has version {parsed['version']}, but this recfx reads "
                f"{FORMAT_VERSION}.",
                reason="checkpoint_version",
                what_to_do=f"load it with the recfx that saved it{trust if parsed['version'] == 1 else ''}.",
            )
        data, files = parsed.get("data"), _files(parsed.get("files"))
        if not isinstance(data, str) or not DATA_NAME.fullmatch(data) or files is None:
            raise torn(path, "it names files that do not belong to a checkpoint")
        return cls(data, files)


def is_foreign(directory: Path) -> bool:
    """Whether the directory has a ``checkpoint.json`` that ``save_checkpoint`` has not written, damaged or not.

    Raises:
        OSError: what the disk says.
    """
    try:
        content = _content(directory)
    except CheckpointError as error:
        return error.reason != "checkpoint_missing"
    rest = content.strip(b"\0")  # some file systems leave zeros in a file after a power cut
    return not (_BEGIN.startswith(rest[: len(_BEGIN)]) or _MARK in rest)


def _content(directory: Path) -> bytes:
    path = directory / MANIFEST
    try:
        with open_regular(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            content = file.read(_MOST_BYTES + 1)
    except CheckpointError:
        if os.path.lexists(path):
            raise
        raise missing(directory) from None
    if len(content) > _MOST_BYTES:
        raise torn(path, f"it has more than {_MOST_BYTES} bytes")
    return content


def _files(entries: object) -> dict[str, tuple[int, str]] | None:
    """The size and checksum of each file, by name; None if the entries are something else."""
    if not isinstance(entries, dict):
        return None
    files = {}
    for name, entry in entries.items():
        if not _FILE_NAME.fullmatch(name) or name in (".", "..") or not isinstance(entry, dict):
            return None
        size, digest = entry.get("bytes"), entry.get("sha256")
        if type(size) is not int or size < 0 or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            return None
        files[name] = size, digest
    return files


@contextmanager
def open_regular(path: Path, directory: int | None = None) -> Iterator[int]:
    """Open a file for reading, if it is a regular file and not a link.

    Args:
        path: path of the file.
        directory: descriptor of an open directory: the file of this name in it is opened, even if it was moved.

    Raises:
        CheckpointError: ``checkpoint_torn``.
        OSError: what the disk says.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO would wait for a writer
    try:
        descriptor = os.open(path if directory is None else path.name, flags, dir_fd=directory)
    except (FileNotFoundError, NotADirectoryError):
        raise torn(path, "it is missing") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link or a socket
            raise torn(path, "it is not a regular file") from None
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise torn(path, "it is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def missing(directory: Path) -> CheckpointError:
    """The error for a directory without a checkpoint, which says what is there instead."""
    what, advice = f"there is no finished checkpoint in {directory}", "pass the directory given to save_checkpoint."
    if not os.path.lexists(directory):
        what = f"{directory} does not exist"
    elif not os.path.isdir(directory):
        what = f"{directory} is not a directory"
    elif DATA_NAME.fullmatch(directory.name) and os.path.exists(directory.parent / MANIFEST):
        what, advice = f"{directory} is a folder inside a checkpoint", f"pass {directory.parent}."
    elif os.path.exists(directory / ".metadata"):
        what = f"{directory} was saved by torch.distributed.checkpoint, not by save_checkpoint"
        advice = "load it with torch.distributed.checkpoint.load."
    return CheckpointError(f"{what}.", reason="checkpoint_missing", what_to_do=advice)


def torn(path: Path, why: str) -> CheckpointError:
    """The error for a damaged file."""
    return CheckpointError(
        f"{path} is damaged: {why}.",
        reason="checkpoint_torn",
        what_to_do="use another checkpoint; nothing was loaded.",
    )


def digest_of(descriptor: int) -> str:
    """SHA-256 of an open file."""
    digest, begin = hashlib.sha256(), 0
    while chunk := os.pread(descriptor, _CHUNK, begin):
        digest.update(chunk)
        begin += len(chunk)
    return digest.hexdigest()
