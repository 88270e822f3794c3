"""``tensors.json``: where in the data files the elements of every tensor are.

The data folder is in the format of ``torch.distributed.checkpoint``, whose own description of it, ``.metadata``, is a
pickle, and reading a pickle can run any code. recfx never reads it, nor the pickles in front of the elements in the
data files. Everything that it needs is here, as JSON, and is checked before it is used.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from recfx.checkpoint.contents import DTYPES, NAMES

INDEX = "tensors.json"
_MOST_DIMENSIONS = 64
_MOST_BYTES = 1 << 62


@dataclass(frozen=True)
class SavedChunk:
    """A rectangle of a tensor, whose elements are stored one after the other in a file.

    Args:
        offsets: where it begins in the tensor.
        sizes: its size.
        file: name of the file.
        begin: where its first element begins in the file, in bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor: its chunks cover it, and no two overlap."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: tuple[SavedChunk, ...]


def to_json(tensors: Mapping[str, SavedTensor]) -> bytes:
    """The content of ``tensors.json``."""
    entries = {
        name: {
            "dtype": NAMES[tensor.dtype],
            "size": tensor.size,
            "chunks": [[chunk.offsets, chunk.sizes, chunk.file, chunk.begin] for chunk in tensor.chunks],
        }
        for name, tensor in tensors.items()
    }
    return json.dumps({"byteorder": sys.byteorder, "tensors": entries}).encode()


def from_json(content: bytes, files: Mapping[str, int]) -> dict[str, SavedTensor]:
    """Read ``tensors.json``.

    Args:
        content: the content of the file.
        files: size of every data file in bytes, by name.

    Raises:
        ValueError: it is not such a file, or refers to data that the files do not have.
    """
    try:
        index = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    entries = _entry(index, "tensors", dict)
    order = _entry(index, "byteorder", str)
    if order != sys.byteorder:
        raise ValueError(f"it was saved on a machine with byte order {order!a}, this one is {sys.byteorder}-endian")
    tensors = {name: _tensor(name, entry, files) for name, entry in entries.items()}
    _check_disjoint(tensors)
    return tensors


def _entry(container: object, key: str, kind: type) -> Any:
    value = container.get(key) if isinstance(container, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"it has no {key!r} of type {kind.__name__}")
    return value


def _tensor(name: str, entry: object, files: Mapping[str, int]) -> SavedTensor:
    dtype = DTYPES.get(_entry(entry, "dtype", str))
    size = _numbers(_entry(entry, "size", list))
    chunks = _entry(entry, "chunks", list)
    if dtype is None or size is None or math.prod(max(1, length) for length in size) * dtype.itemsize > _MOST_BYTES:
        raise ValueError(f"tensor {name!a} has a wrong dtype or size")
    checked = tuple(_chunk(name, chunk, size, dtype.itemsize, files) for chunk in chunks)
    if not _covers(size, [chunk for chunk in checked if math.prod(chunk.sizes) > 0]):
        raise ValueError(f"the parts of tensor {name!a} do not make it up")
    return SavedTensor(dtype, size, checked)


def _chunk(name: str, chunk: object, size: tuple[int, ...], itemsize: int, files: Mapping[str, int]) -> SavedChunk:
    if not isinstance(chunk, list) or len(chunk) != 4:
        raise ValueError(f"a part of tensor {name!a} is described wrongly")
    offsets, sizes, begin = _numbers(chunk[0]), _numbers(chunk[1]), _numbers([chunk[3]])
    if offsets is None or sizes is None or begin is None or not len(offsets) == len(sizes) == len(size):
        raise ValueError(f"a part of tensor {name!a} is described wrongly")
    if any(first + length > whole for first, length, whole in zip(offsets, sizes, size, strict=True)):
        raise ValueError(f"a part of tensor {name!a} is outside of it")
    file = chunk[2]
    if not isinstance(file, str) or file not in files:
        raise ValueError(f"a part of tensor {name!a} is in {file!a}, which is not a file of the checkpoint")
    if begin[0] + math.prod(sizes) * itemsize > files[file]:
        raise ValueError(f"a part of tensor {name!a} is beyond the end of {file}")
    return SavedChunk(offsets, sizes, file, begin[0])


def _numbers(values: object) -> tuple[int, ...] | None:
    if not isinstance(values, list) or len(values) > _MOST_DIMENSIONS:
        return None
    if any(type(value) is not int or not 0 <= value <= _MOST_BYTES for value in values):  # True is an int
        return None
    return tuple(values)


def _covers(size: tuple[int, ...], chunks: list[SavedChunk]) -> bool:
    """Whether the chunks make up the tensor: blocks of columns side by side, each cut into rows."""
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        return False
    if len(chunks) < 2:
        return True
    if len(size) > 2:
        return False  # only tables and what belongs to their rows are cut
    blocks: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for chunk in chunks:
        columns = (*chunk.offsets[1:], *chunk.sizes[1:])
        blocks.setdefault(columns, []).append((chunk.offsets[0], chunk.sizes[0]))
    if len(size) == 2 and _overlap((columns[0], columns[1]) for columns in blocks):
        return False
    return not any(_overlap(rows) for rows in blocks.values())


def _overlap(intervals: Iterator[tuple[int, int]] | list[tuple[int, int]]) -> bool:
    """Whether any two of the intervals, given as begin and length, overlap."""
    end = 0
    for begin, length in sorted(intervals):
        if begin < end:
            return True
        end = begin + length
    return False


def _check_disjoint(tensors: Mapping[str, SavedTensor]) -> None:
    """Check that no byte belongs to two tensors, so that the tensors are never bigger than the files."""
    regions: dict[str, list[tuple[int, int]]] = {}
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            if length := math.prod(chunk.sizes) * tensor.dtype.itemsize:
                regions.setdefault(chunk.file, []).append((chunk.begin, length))
    for file, intervals in regions.items():
        if _overlap(intervals):
            raise ValueError(f"two tensors are at the same place in {file}")
