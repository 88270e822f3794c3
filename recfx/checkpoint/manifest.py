"""The manifest: which data folder counts, and the size and checksum of every file in it.

Two lines: JSON, and the SHA-256 of the first line. It is written beside the old one and renamed over it, so that there
is always one whole manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recfx.checkpoint.directory import MANIFEST, sync_directory, write_durably
from recfx.errors import CheckpointError

_VERSION = 1
_CHUNK = 1 << 22


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
        """Of a folder just written; its files and names are on the disk when this returns."""
        files = {}
        for path in sorted(folder.iterdir()):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            files[path.name] = path.stat().st_size, _digest(path)
        sync_directory(folder)
        return cls(folder.name, files)

    def switch(self, directory: Path, temporary_name: str) -> None:
        """Make this the directory's manifest: before, the old checkpoint is what loads; after, the new one."""
        entries = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        body = json.dumps({"format": "recfx", "version": _VERSION, "data": self.data, "files": entries}, sort_keys=True)
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
        """
        try:
            content = (directory / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise missing(directory) from None
        line, _, rest = content.partition(b"\n")
        if rest != hashlib.sha256(line).hexdigest().encode() + b"\n":
            raise torn(directory / MANIFEST, "its checksum is another")
        found: dict[str, Any] = json.loads(line)
        if found["version"] != _VERSION:
            raise CheckpointError(
                f"the checkpoint in {directory} has version {found['version']}, this recfx reads {_VERSION}.",
                reason="checkpoint_version",
                what_to_do="load it with the recfx that saved it.",
            )
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in found["files"].items()}
        return cls(found["data"], files)

    def verify_files(self, directory: Path) -> Path:
        """The data folder, every file read and compared.

        Raises:
            CheckpointError: ``checkpoint_torn``.
        """
        folder = directory / self.data
        for name, (size, digest) in self.files.items():
            path = folder / name
            if not path.is_file():
                raise torn(path, "it is missing")
            if path.stat().st_size != size:
                raise torn(path, f"it has {path.stat().st_size} bytes instead of {size}")
            if _digest(path) != digest:
                raise torn(path, "its checksum is another")
        return folder


def missing(directory: Path) -> CheckpointError:
    """The error for a directory without a checkpoint."""
    return CheckpointError(
        f"there is no finished checkpoint in {directory}.",
        reason="checkpoint_missing",
        what_to_do="name the directory that save_checkpoint was given.",
    )


def torn(path: Path, what: str) -> CheckpointError:
    """The error for a damaged file."""
    return CheckpointError(
        f"{path} is damaged: {what}.",
        reason="checkpoint_torn",
        what_to_do="use another checkpoint; nothing was loaded.",
    )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
