"""The manifest: which data folder is valid, and the size and checksum of every file in it.

It has two lines: JSON, and the SHA-256 of the first line. It is written beside the old one and renamed over it, so
there is always one complete manifest. The checksums detect damage. They prove nothing about who wrote the files.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from recfx.checkpoint.directory import MANIFEST, write_durably
from recfx.errors import CheckpointError
from recfx.kernels.build.private_files import sync_directory

FORMAT_VERSION = 3  # 2 had settings in JSON, and 1 could only be read by unpickling it
_READ = (2, FORMAT_VERSION)
_CHUNK = 1 << 22
_BEGIN, _MARK = b'{"data": "data-', b'"format": "recfx"'  # a damaged manifest still contains one of these


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
            if version not in _READ:
                raise CheckpointError(
                    f"the checkpoint in {directory} has version {version}, but this recfx reads {_READ[0]} and "
                    f"{_READ[1]}.",
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
    return CheckpointError(
        f"there is no finished checkpoint of save_checkpoint in {directory}.",
        reason="checkpoint_missing",
        what_to_do="pass the directory given to save_checkpoint.",
    )


def torn(path: Path, why: str) -> CheckpointError:
    """The error for a damaged file."""
    return CheckpointError(
        f"{path} is damaged: {why}.",
        reason="checkpoint_torn",
        what_to_do="use another checkpoint; nothing was loaded.",
    )


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
