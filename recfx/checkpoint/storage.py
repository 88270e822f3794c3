"""Tensors in a folder, in the format of ``torch.distributed.checkpoint``: one flat dict of names, tensors only."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from recfx.checkpoint.parts import LoadPlanner, Parts, SavePlanner


@contextmanager
def _single_process() -> Iterator[None]:
    with warnings.catch_warnings():  # DCP says that it assumes a single process, each time
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def write(folder: Path, tensors: Mapping[str, Tensor | Parts], group: dist.ProcessGroup | None = None) -> None:
    """Write ``tensors`` to a new folder: with a group those of all its ranks, each tensor or part from one of them."""
    with _single_process():
        save(
            dict(tensors), storage_writer=FileSystemWriter(folder), planner=SavePlanner(), process_group=group,
            no_dist=group is None,
        )  # fmt: skip


def missing_files(folder: Path) -> list[str]:
    """Files that some rank has written, and that are not there for this one."""
    entries = FileSystemReader(folder).read_metadata().storage_data.values()
    return sorted({entry.relative_path for entry in entries if not (folder / entry.relative_path).is_file()})


def describe(folder: Path) -> dict[str, Tensor]:
    """Shapes and dtypes of what is in the folder, as meta tensors. Its files must have been verified."""
    metadata = FileSystemReader(folder).read_metadata()
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_into(folder: Path, targets: Mapping[str, Tensor | Parts]) -> None:
    """Read tensors of the folder into ``targets``, which have their shapes; other dtypes are converted."""
    if targets:
        with _single_process():
            planner = LoadPlanner(flatten_state_dict=False)
            load(dict(targets), storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)


def read(folder: Path, described: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read tensors that ``describe`` has named into new ones on the CPU."""
    found = {name: torch.empty_like(tensor, device="cpu") for name, tensor in described.items()}
    read_into(folder, found)
    return found


def pack(value: Any) -> Tensor:
    """Plain data (numbers, strings, tensors, and lists and dicts of them) as a uint8 tensor.

    Raises:
        Exception: what ``torch.load(weights_only=True)`` says of other things.
    """
    stream = io.BytesIO()
    torch.save(value, stream)
    packed = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
    unpack(packed)
    return packed


def unpack(packed: Tensor) -> Any:
    """What ``pack`` was given."""
    return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True, map_location="cpu")
