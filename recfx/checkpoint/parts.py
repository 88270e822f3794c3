"""Parts of a tensor, as ``torch.distributed.checkpoint`` writes and reads them: each rank handles its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


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
        """A rectangle that was added."""
        assert offsets is not None
        return self._parts[offsets]

    # The interface that DCP's planners use.

    def size(self) -> torch.Size:
        """The size of the whole tensor."""
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
    """DCP's, which also finds ``Parts``."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written."""
        found: Any = self.state_dict[index.fqn]
        return found.at(index.offset) if isinstance(found, Parts) else super().lookup_object(index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Tensor:
        """Its elements in order, because they are found by their position in the file."""
        tensor: Tensor = object
        return tensor.detach().resolve_conj().resolve_neg().contiguous()
