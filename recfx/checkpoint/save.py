"""``recfx.save_checkpoint``: everything is written beside the old checkpoint, which one rename then replaces."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recfx.checkpoint import storage
from recfx.checkpoint.directory import check_writable, locked, make_directory, new_names, remove_leftovers
from recfx.checkpoint.disk_errors import told_as
from recfx.checkpoint.in_backward import optimizers_in_backward
from recfx.checkpoint.manifest import Manifest
from recfx.checkpoint.names import IN_BACKWARD, MODEL, OPTIMIZER, SETTINGS
from recfx.checkpoint.not_sharded import refuse_sharded
from recfx.checkpoint.ordinary import describe_optimizer, unwrap_optimizer
from recfx.discovery import unwrap
from recfx.errors import CheckpointError


def save_checkpoint(
    model: nn.Module, directory: str | os.PathLike[str], *, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Save a model, its indexes and its optimizers in backward, so that training goes on exactly where it was.

    A crash at any moment leaves the checkpoint that was there before, or the new one. The old one is deleted when the
    new one is safely on the disk; nothing outside ``directory`` is written.

    Args:
        model: converted or not. Saved are its ``state_dict`` (without the prefix of DistributedDataParallel) and state
            and settings of every optimizer in backward. In a process group one process calls this.
        directory: made if need be. One checkpoint a directory.
        optimizer: an ordinary optimizer, saved as well.

    Raises:
        CheckpointError: ``checkpoint_not_written`` (the disk is full, say, or the directory is not ours to write:
            the checkpoint that was there before is as it was), ``checkpoint_busy``, ``model_on_meta``,
            ``model_is_sharded``, ``optimizer_not_supported`` (also one that steps parameters outside the model),
            ``value_not_supported``.
    """
    path = Path(directory)
    refuse_sharded(model)
    tensors = _contents(unwrap(model), optimizer)
    data, temporary = new_names()

    def consequence() -> str:
        if _counts(path, data):
            return "The new checkpoint is complete, but may not survive a crash, and the old one may still be there."
        return "The old checkpoint, if there was one, is as it was."

    what_to_do = "make room on the disk, or make the directory one that can be written, and save again."
    with told_as("checkpoint_not_written", path, consequence, what_to_do):
        _write(path, tensors, data, temporary)


def _write(path: Path, tensors: dict[str, Tensor], data: str, temporary: str) -> None:
    make_directory(path)
    with locked(path, shared=False):
        _remove_leftovers(path)
        try:
            check_writable(path, temporary)
            storage.write(path / data, tensors)
            Manifest.of_folder(path / data).switch(path, temporary)
        except BaseException:
            if not _counts(path, data):
                shutil.rmtree(path / data, ignore_errors=True)
                (path / temporary).unlink(missing_ok=True)
            raise
        remove_leftovers(path, keep=data)


def _contents(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All that is saved, by name; nothing is copied."""
    tensors: dict[str, Tensor] = {}
    extra_state = {}
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            tensors[MODEL + name] = value.detach()
        else:
            extra_state[name] = value
    in_backward = {}
    for found in optimizers_in_backward(model):
        for key, tensor in found.tensors().items():
            tensors[f"{IN_BACKWARD}{found.name}.{key}"] = tensor
        in_backward[found.name] = {
            "kind": found.kind,
            "settings": found.settings(),
            "values": found.values(),
            "tensors": list(found.tensors()),
        }
    _refuse_meta(tensors)
    described = None
    if optimizer is not None:
        state, described = describe_optimizer(unwrap_optimizer(optimizer), model)
        tensors.update({OPTIMIZER + name: tensor for name, tensor in state.items()})
    _refuse_meta(tensors)
    settings = {"extra_state": extra_state, "in_backward": in_backward, "optimizer": described}
    try:
        tensors[SETTINGS] = storage.pack(settings)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"a setting of an optimizer, or an extra state of a module, is not plain data ({error}).",
            reason="value_not_supported",
            what_to_do="use numbers, strings, tensors, and lists and dicts of them.",
        ) from error
    return tensors


def _refuse_meta(tensors: dict[str, Tensor]) -> None:
    on_meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if on_meta:
        raise CheckpointError(
            f"{on_meta[0]} is on the meta device: there is nothing to save.",
            reason="model_on_meta",
            what_to_do="call to_empty() and initialise the model first.",
        )


def _remove_leftovers(path: Path) -> None:
    """What killed writers have left; where the manifest is damaged, nobody knows what is a leftover."""
    try:
        keep = Manifest.read(path).data
    except CheckpointError as error:
        if error.reason != "checkpoint_missing":
            return
        keep = ""
    remove_leftovers(path, keep)


def _counts(path: Path, data: str) -> bool:
    """Whether the manifest was switched to ``data`` already, when something went wrong after."""
    try:
        return Manifest.read(path).data == data
    except (CheckpointError, OSError):
        return False
