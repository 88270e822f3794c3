"""Tensors in a folder: written in the format of ``torch.distributed.checkpoint``, read by the position of elements.

A rank writes and reads its own parts of a tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from recfx.checkpoint.directory import write_durably
from recfx.checkpoint.saved_folder import SavedFolder
from recfx.checkpoint.tensor_index import INDEX, SavedChunk, SavedTensor, from_json, to_json


class Parts:
    """Rectangles of one tensor.

    Args:
        size: size of the whole tensor.
    """

    def __init__(self, size: tuple[int, ...]) -> None:
        self._size = torch.Size(size)
        self._parts: dict[torch.Size, Tensor] = {}

    def put(self, offsets: tuple[int, ...], part: Tensor) -> Parts:
        """Add the rectangle that begins at ``offsets``, from which data is written or into which it is read."""
        self._parts[torch.Size(offsets)] = part.detach()
        return self

    def at(self, offsets: torch.Size | None) -> Tensor:
        assert offsets is not None
        return self._parts[offsets]

    # The interface that DCP's planners use.

    def size(self) -> torch.Size:
        return self._size

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, part.size()) for offsets, part in self._parts.items()]

    def __create_write_items__(self, name: str, value: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(self._parts[chunk.offsets]), self._size
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]


class SavePlanner(DefaultSavePlanner):
    """DCP's planner, which also finds ``Parts``."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value: Any = self.state_dict[index.fqn]
        return value.at(index.offset) if isinstance(value, Parts) else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Tensor:
        """Its elements in order, because they are found by their position in the file."""
        tensor: Tensor = object
        return tensor.detach().resolve_conj().resolve_neg().contiguous()


class _Writer(FileSystemWriter):
    """DCP's writer, which says where it has written what; torch 2.9 to 2.11 would say so in a copy alone."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}


def write(folder: Path, tensors: Mapping[str, Tensor | Parts], group: dist.ProcessGroup | None = None) -> Metadata:
    """Write ``tensors`` to a new folder; with a group, all its ranks' tensors, each tensor or part from one of them.

    Returns:
        what DCP has written, for ``write_index``, because the file that says so must not be read.
    """
    with warnings.catch_warnings():  # DCP says that it assumes a single process, each time
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return save(
            dict(tensors), storage_writer=_Writer(folder), planner=SavePlanner(), process_group=group,
            no_dist=group is None,
        )  # fmt: skip


def write_index(folder: Path, metadata: Metadata) -> None:
    """Add ``tensors.json`` to a folder that ``write`` has written.

    Raises:
        OSError: an error of the disk, or this rank does not see a file that another rank has written.
    """
    files = sorted({entry.relative_path for entry in metadata.storage_data.values()})
    for file in files:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{file} of another rank is not in {folder} here: the directory must be shared")
    begins = _begins(folder, metadata)
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        chunks = []
        for chunk in entry.chunks:
            index = MetadataIndex(name, chunk.offsets)
            file = metadata.storage_data[index].relative_path
            chunks.append(SavedChunk(tuple(chunk.offsets), tuple(chunk.sizes), file, begins[index]))
        tensors[name] = SavedTensor(entry.properties.dtype, tuple(entry.size), tuple(chunks))
    content = to_json(tensors)
    from_json(content, {file: (folder / file).stat().st_size for file in files})  # raises if it could not be loaded
    write_durably(folder / INDEX, content)


def _begins(folder: Path, metadata: Metadata) -> dict[MetadataIndex, int]:
    """Where the elements of each chunk begin in their file, after what ``torch.save`` writes in front of them."""
    by_file: dict[str, list[MetadataIndex]] = {}
    for index, entry in metadata.storage_data.items():
        by_file.setdefault(entry.relative_path, []).append(index)
    begins = {}
    for file, indexes in by_file.items():
        with open(folder / file, "rb") as stream:
            for index in indexes:
                entry = metadata.storage_data[index]
                view: Any = _create_file_view(stream, entry.offset, entry.length)
                archive: Any = torch._C.PyTorchFileReader(view)
                begins[index] = entry.offset + archive.get_record_offset("data/0")
    return begins


def describe(folder: SavedFolder) -> dict[str, Tensor]:
    """Shapes and dtypes of the tensors in the folder, as meta tensors.

    Raises:
        CheckpointError: ``checkpoint_torn``.
    """
    return {name: torch.empty(saved.size, dtype=saved.dtype, device="meta") for name, saved in folder.tensors.items()}


def read_into(folder: SavedFolder, targets: Mapping[str, Tensor | Parts]) -> None:
    """Read tensors of the folder into ``targets``, which have the same shapes; dtypes are converted."""
    for name, target in targets.items():
        saved = folder.tensors[name]
        if tuple(target.size()) != saved.size:
            raise ValueError(f"{name} was saved as {saved.size}, not {tuple(target.size())}")
        if isinstance(target, Parts):
            parts = target
        else:
            parts = Parts(saved.size).put((0,) * len(saved.size), target)
        chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in saved.chunks]
        described = TensorStorageMetadata(TensorProperties(saved.dtype), torch.Size(saved.size), chunks)
        for item in create_read_items_for_chunk_list(name, described, parts.__create_chunk_list__()):
            assert item.storage_index.index is not None
            part = parts.at(item.dest_index.offset)
            for dim, (begin, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, begin, length)
            chunk = saved.chunks[item.storage_index.index]
            folder.read(chunk, saved.dtype, tuple(item.storage_offsets), tuple(item.lengths), part)
            if not part.is_inference():
                increment_version(part)  # because not all reading goes through torch


def read(folder: SavedFolder, described: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors that ``describe`` has named into new ones on the CPU."""
    with torch.inference_mode(False):  # optimizers keep them, and change them in place
        tensors = {name: torch.empty_like(tensor, device="cpu") for name, tensor in described.items()}
    read_into(folder, tensors)
    return tensors
