"""``recfx.load_checkpoint``: everything is checked before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recfx.checkpoint import storage
from recfx.checkpoint.directory import locked
from recfx.checkpoint.disk_errors import told_as
from recfx.checkpoint.in_backward_plan import plan_in_backward
from recfx.checkpoint.manifest import Manifest, missing
from recfx.checkpoint.model_plan import plan_model
from recfx.checkpoint.names import OPTIMIZER, SETTINGS, mismatch, with_prefix
from recfx.checkpoint.not_sharded import refuse_sharded
from recfx.checkpoint.ordinary import load_state, rebuild_state, unwrap_optimizer
from recfx.discovery import unwrap
from recfx.hashing.row_move import RowMove


def load_checkpoint(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    in_backward: bool = True,
) -> None:
    """Load what ``save_checkpoint`` saved: training goes on as if it had never stopped, to the bit.

    Files, names, shapes, dtypes and indexes are checked first: after an error the model, its indexes and its optimizers
    are as they were. Only a disk that fails between the check and the reading of big weights (the message says so), a
    load hook of the user's that raises, or interrupting this while big weights are read (Ctrl-C) can leave a mixture
    of old and new: load again then.

    Args:
        model: built, converted, and given its optimizers in backward as when saving. Tables with an index may have more
            rows: ids move to their bucket's rows, and weights and fused state with them.
        directory: as given to ``save_checkpoint``.
        optimizer: an ordinary optimizer to load as well; one that was saved is left out without it.
        in_backward: False leaves optimizers in backward alone, for a model that is only to be evaluated, say.

    Raises:
        CheckpointError: ``checkpoint_missing``, ``checkpoint_torn``, ``checkpoint_version``, ``checkpoint_busy``,
            ``checkpoint_unreadable`` (what the disk says), ``checkpoint_mismatch`` (another model, naming what
            differs, or a table that has an index on one side only), ``model_on_meta``,
            ``model_is_sharded``, ``optimizer_not_supported``, ``bucket_too_small``, or what is wrong with an index.
    """
    path = Path(directory)
    refuse_sharded(model)
    consequence = ["Nothing was loaded."]
    what_to_do = "see that the files can be read, and load again, or use another checkpoint."
    with told_as("checkpoint_unreadable", path, lambda: consequence[-1], what_to_do):
        _load(unwrap(model), path, optimizer, in_backward, consequence)


def _load(
    root: nn.Module, path: Path, optimizer: torch.optim.Optimizer | None, in_backward: bool, consequence: list[str]
) -> None:
    """``consequence`` gets what is true of the model if the disk fails from here on."""
    if not path.is_dir():
        raise missing(path)
    with locked(path, shared=True):
        folder = Manifest.read(path).verify_files(path)
        described = storage.describe(folder)
        settings = storage.unpack(storage.read(folder, {SETTINGS: described[SETTINGS]})[SETTINGS])
        plan = plan_model(root, folder, described, settings["extra_state"])
        backward = plan_in_backward(root, described, settings["in_backward"], plan.moves) if in_backward else []
        rebuilt = None
        if optimizer is not None:
            rebuilt = _ordinary(root, optimizer, folder, described, settings["optimizer"], plan.moves)
        for each in backward:
            each.prepare()
        consequence.append("The model may hold a mixture of old and new.")
        if optimizer is not None and rebuilt is not None:
            load_state(optimizer, rebuilt)
        with torch.no_grad():
            plan.carry_out()
            for each in backward:
                each.carry_out(folder)


def _ordinary(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    described: Mapping[str, Tensor],
    saved: Mapping[str, Any] | None,
    moves: Mapping[str, RowMove],
) -> dict[str, Any]:
    inner = unwrap_optimizer(optimizer)
    if saved is None:
        raise mismatch(
            "the checkpoint was saved without optimizer=.",
            module_path="optimizer",
            what_to_do="load it without optimizer= as well.",
        )
    names = [name for name in described if name.startswith(OPTIMIZER)]
    moved = {name for name in names for weight in moves if name.startswith(f"{OPTIMIZER}{weight}.")}
    if moved:
        raise mismatch(
            f"{min(moved)} has a table's rows, and the table has more rows now.",
            module_path="optimizer",
            what_to_do="load without optimizer=; only fused optimizers follow their table's rows.",
        )
    tensors = with_prefix(storage.read(folder, {name: described[name] for name in names}), OPTIMIZER)
    return rebuild_state(inner, model, tensors, saved)
