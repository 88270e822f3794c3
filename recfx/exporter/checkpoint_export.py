"""Loads a checkpoint into a copy of a model, so that it can be exported without the process that trained."""

from __future__ import annotations

import os

import torch
from torch import nn

from recfx.checkpoint.load import load_part
from recfx.collections.copy_modules import copy_with_tensors
from recfx.conversion.convert import convert
from recfx.errors import CheckpointError
from recfx.exporter.model_copies import own_buffers


def loaded_copy(model: nn.Module, directory: str | os.PathLike[str], submodule: str) -> nn.Module:
    """A converted copy of a model, with what ``save_checkpoint`` has saved.

    Args:
        model: built and converted as when saving, in one process, and possibly on meta; it does not change. One that is
            not converted stands for tables without an index.
        directory: the checkpoint, saved by any number of ranks.
        submodule: the path of the model in the one that was saved; empty if it is the whole one.

    Raises:
        CheckpointError: as ``load_checkpoint``; ``model_on_meta``: a buffer is on meta and was not saved.
    """
    copy = copy_with_tensors(convert(model, verify=False, on_unsupported="keep"))
    saved = copy.state_dict()
    unsaved = [name for name, buffer in own_buffers(copy).items() if buffer.is_meta and name not in saved]
    allocated: dict[int, torch.Tensor] = {}  # modules may share tensors

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        return allocated.setdefault(id(tensor), torch.empty_like(tensor, device="cpu"))

    copy._apply(allocate)
    load_part(copy, directory, submodule)
    if unsaved:
        raise CheckpointError(
            "the tensor is on meta, and is not saved.",
            reason="model_on_meta",
            module_path=unsaved[0],
            what_to_do="build the model with only its tables on meta.",
        )
    return copy
