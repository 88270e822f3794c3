"""The data folder of a checkpoint, opened for reading.

Its author may be malicious. So the folder is opened once, and its files are opened inside it: regular files only, never
through a link. Renaming things in the directory meanwhile has no effect, and a file that was changed after it was
checked is not read.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recfx.checkpoint.directory import locked
from recfx.checkpoint.manifest import Manifest, digest_of, missing, open_regular, torn
from recfx.checkpoint.tensor_index import INDEX, SavedChunk, SavedTensor, from_json

_MOST_INDEX_BYTES = 1 << 28
_PIECE = 1 << 26


class SavedFolder:
    """A data folder that is open until ``close``.

    Args:
        directory: the directory of the checkpoint.
        manifest: its manifest, read and checked.

    Raises:
        CheckpointError: ``checkpoint_torn``.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.path = directory / manifest.data
        self.manifest = manifest
        self._files = manifest.files
        self._checked: dict[str, tuple[int, ...]] = {}
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self.path, flags)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
            raise torn(self.path, "it is missing or not a directory") from None

    def close(self) -> None:
        """Close the folder; nothing can be read afterwards."""
        os.close(self._descriptor)

    def verify(self) -> None:
        """Read all files, and compare them with the manifest.

        Raises:
            CheckpointError: ``checkpoint_torn``.
        """
        for name, (_, digest) in self._files.items():
            with self._opened(name) as descriptor:
                if digest_of(descriptor) != digest:
                    raise torn(self.path / name, "its checksum is wrong")
                self._checked[name] = _identity(os.fstat(descriptor))

    @cached_property
    def tensors(self) -> dict[str, SavedTensor]:
        """What is saved, by name.

        Raises:
            CheckpointError: ``checkpoint_torn``.
        """
        path = self.path / INDEX
        if INDEX not in self._files:
            raise torn(path, "the manifest does not name it")
        size, digest = self._files[INDEX]
        if size > _MOST_INDEX_BYTES:
            raise torn(path, f"it has {size} bytes, more than save_checkpoint ever writes")
        content = bytearray(size)
        with self._opened(INDEX) as descriptor:
            _read(descriptor, memoryview(content), 0)
        if hashlib.sha256(content).hexdigest() != digest:  # of the very bytes read here, not of the file before
            raise torn(path, "its checksum is wrong")
        try:
            return from_json(bytes(content), {name: length for name, (length, _) in self._files.items()})
        except ValueError as error:
            raise torn(path, str(error)) from None

    def read(
        self, chunk: SavedChunk, dtype: torch.dtype, begin: tuple[int, ...], lengths: tuple[int, ...], target: Tensor
    ) -> None:
        """Read a rectangle.

        Args:
            chunk: a chunk of a saved tensor.
            dtype: dtype of that tensor.
            begin: where the rectangle begins in the chunk.
            lengths: its size.
            target: a tensor of this size; values are converted to its dtype.

        Raises:
            OSError: an error of the disk, or the file was changed.
        """
        columns = chunk.sizes[1:]
        row_bytes = math.prod(columns) * dtype.itemsize
        first = begin[0] if begin else 0
        with self._opened(chunk.file) as descriptor:
            if lengths[1:] == columns and target.dtype == dtype and _stands_as_it_is(target):
                _read_elements(descriptor, target, chunk.begin + first * row_bytes)
                return
            rows = lengths[0] if lengths else 1
            step = max(1, _PIECE // max(1, row_bytes))
            for row in range(0, rows, step):
                count = min(step, rows - row)
                piece = torch.empty((count, *columns), dtype=dtype, device="cpu")
                _read_elements(descriptor, piece, chunk.begin + (first + row) * row_bytes)
                for dim in range(1, len(lengths)):
                    piece = piece.narrow(dim, begin[dim], lengths[dim])
                if lengths:
                    target[row : row + count].copy_(piece)
                else:
                    target.copy_(piece[0])

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        with open_regular(self.path / name, self._descriptor) as descriptor:
            status, size = os.fstat(descriptor), self._files[name][0]
            if name in self._checked and _identity(status) != self._checked[name]:
                raise OSError(f"{name} was changed while it was read")
            if status.st_size != size:
                raise torn(self.path / name, f"it has {status.st_size} bytes instead of {size}")
            yield descriptor


@contextmanager
def open_verified(directory: Path) -> Iterator[SavedFolder]:
    """The data folder of a checkpoint that no writer can change meanwhile, and whose files were all read once.

    Raises:
        CheckpointError: ``checkpoint_missing``, ``checkpoint_torn``, ``checkpoint_version``, ``checkpoint_busy``.
    """
    if not directory.is_dir():
        raise missing(directory)
    with locked(directory, shared=True), closing(SavedFolder(directory, Manifest.read(directory))) as folder:
        folder.verify()
        yield folder


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, stat.S_IFMT(status.st_mode)


def _stands_as_it_is(tensor: Tensor) -> bool:
    """Whether the elements of a tensor are laid out in memory as in a file."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _read_elements(descriptor: int, target: Tensor, begin: int) -> None:
    # view(-1) would keep any stride that a tensor of one element has.
    elements = target.detach().as_strided((target.numel(),), (1,)).view(torch.uint8)
    content: Any = elements.numpy()
    _read(descriptor, memoryview(content), begin)
    if target.dtype == torch.bool:
        elements.clamp_(max=1)  # operators may do anything with a bool whose byte is not 0 or 1


def _read(descriptor: int, target: memoryview, begin: int) -> None:
    while len(target) > 0:
        count = os.preadv(descriptor, [target], begin)
        if count == 0:
            raise OSError("a file became shorter while it was read")
        target, begin = target[count:], begin + count
