"""Tensors in a folder of ``torch.distributed.checkpoint`` (DCP), of which each rank writes and reads its own parts.

DCP reads tensors with ``torch.load(weights_only=True)``. Its description of them, ``.metadata``, is a pickle, which is
read here by an unpickler that knows no other classes than those of such a description. So no file can run code.

What is no tensor, extra states of modules and settings of optimizers, is stored as a tensor of bytes, which are those
of ``torch.save``, to be read with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_map

from recfx.checkpoint.contents import SETTINGS
from recfx.checkpoint.directory import torn
from recfx.errors import CheckpointError


class Parts:
    """Rectangles of one tensor, of which ``size`` is that of the whole tensor."""

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


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        value: Any = self.state_dict[index.fqn]
        return value.at(index.offset) if isinstance(value, Parts) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, targets: Mapping[str, Any], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict, self.metadata = dict(targets), metadata

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value: Any = self.state_dict[index.fqn]
        return value.at(index.offset) if isinstance(value, Parts) else super().lookup_tensor(index)


class _MetadataUnpickler(pickle.Unpickler):
    """Refuses everything but data of DCP's own classes."""

    _CLASSES = frozenset(
        (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_get_layout", "Size", "PosixPath",
        )
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (name in self._CLASSES and module.startswith(("torch", "pathlib"))):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong to it")


class SavedFolder:
    """A data folder, opened for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def metadata(self) -> Metadata:
        """DCP's description of the folder; ``checkpoint_torn`` if it is none."""
        path = self.path / ".metadata"
        content = path.read_bytes()
        try:
            metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        except Exception as error:  # a pickle that is damaged can raise anything
            raise torn(path, f"it does not describe a checkpoint ({error})") from None
        if not isinstance(metadata, Metadata):
            raise torn(path, "it does not describe a checkpoint")
        return metadata

    @cached_property
    def described(self) -> dict[str, Tensor]:
        """The shapes and dtypes of all saved tensors, as meta tensors."""
        entries = self.metadata.state_dict_metadata.items()
        return {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in entries
            if isinstance(entry, TensorStorageMetadata)
        }

    def read_into(self, targets: Mapping[str, Tensor | Parts]) -> None:
        """Read tensors into ``targets``, which have the same shapes; dtypes are converted."""
        planner, reader = _LoadPlanner(targets, self.metadata), FileSystemReader(self.path)
        reader.set_up_storage_reader(self.metadata, True)
        try:
            reader.read_data(planner.create_local_plan(), planner).wait()
        except (pickle.UnpicklingError, EOFError) as error:
            raise torn(self.path, f"it has something else than tensors ({error})") from error

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors into new ones on the CPU."""
        with torch.inference_mode(False):  # optimizers keep them, and change them in place
            tensors = {name: torch.empty_like(self.described[name], device="cpu") for name in names}
        self.read_into(tensors)
        return tensors


def write(folder: Path, tensors: Mapping[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Write tensors, ``ShardedTensor``s and ``Parts`` to a new folder; with a group, those of all its ranks."""
    with warnings.catch_warnings():  # DCP says that it assumes a single process, each time
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(
            dict(tensors), storage_writer=FileSystemWriter(folder), planner=_SavePlanner(), process_group=group,
            no_dist=group is None,
        )  # fmt: skip


def pack_settings(settings: dict[str, Any]) -> Tensor:
    """The settings as a uint8 tensor; ``value_not_supported`` for what is not plain data."""
    stream = io.BytesIO()
    try:
        torch.save(tree_map(_plain, settings), stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception as error:  # of the user's classes
        refused = re.search(r"GLOBAL (\S+)", str(error))  # in a message of a page
        what = refused[1] if refused else f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"a setting of an optimizer, or an extra state of a module, is not plain data ({what}).",
            reason="value_not_supported",
            what_to_do="use numbers, strings and tensors, and lists and dicts of them.",
        ) from error
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    if isinstance(value, (numpy.float64, numpy.int64, numpy.bool_)):  # these compute bit for bit as Python's do
        return value.item()
    return value.detach().to("cpu", copy=True) if type(value) is Tensor else value  # not all that it is a view of


def read_settings(folder: SavedFolder) -> dict[str, Any]:
    """The settings that were given to ``pack_settings``; ``checkpoint_torn`` if they cannot be read."""
    if SETTINGS not in folder.described:
        raise torn(folder.path, "it has no settings")
    content = folder.read([SETTINGS])[SETTINGS].numpy().tobytes()
    try:
        settings: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except Exception as error:
        raise torn(folder.path, f"its settings cannot be read: {error}") from None
    return settings
