"""``recfx.save_checkpoint``: writes everything beside the old checkpoint, which one rename then replaces."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from recfx.checkpoint import storage
from recfx.checkpoint.contents import MODEL, SETTINGS, check_tensor
from recfx.checkpoint.directory import MANIFEST, Manifest, disk_errors, is_foreign, locked, new_name, remove_leftovers
from recfx.checkpoint.optimizers import (
    describe_in_backward,
    describe_optimizer,
    join_described,
    unwrap_optimizer,
    warm_ups,
)
from recfx.checkpoint.peers import Peers, checked_arguments
from recfx.checkpoint.storage import SavedFolder, pack_settings
from recfx.collections.converted_collection import collections_by_prefix
from recfx.collections.sharding.collection import ShardedCollection
from recfx.errors import CheckpointError
from recfx.errors.argument_types import typed
from recfx.kernels.build.private_files import sync_directory
from recfx.optim.ordinary_optimizers import reset_before_saving


@typed(CheckpointError, left=("optimizer",))
def save_checkpoint(
    model: nn.Module, directory: str | os.PathLike[str], *, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Save a model, its indexes and its optimizers in backward, so that training can continue exactly where it was.

    A crash at any moment leaves either the previous checkpoint or the new one. The previous one is deleted once the new
    one is safely on the disk; nothing is written outside ``directory``.

    Example:
        >>> model = recfx.convert(Model())
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> recfx.save_checkpoint(model, "run", optimizer=optimizer)
        >>> recfx.load_checkpoint(model, "run", optimizer=optimizer)

    Args:
        model: converted or not. Its ``state_dict`` is saved (without the prefix of DistributedDataParallel), and the
            state and settings of every optimizer in backward. If collections are sharded, all ranks call this, and
            what is not sharded is taken from the first rank; otherwise one process calls it. A learning-rate scheduler
            can be the extra state of a module: see recfx/checkpoint/README.md.
        directory: created if necessary. It holds one checkpoint; ranks share it.
        optimizer: an ordinary optimizer to save as well; it may be in TorchRec's wrappers, with fused ones beside it.

    Raises:
        CheckpointError: ``checkpoint_not_written`` (for example, the disk is full or the directory is not writable; the
            previous checkpoint is as it was), ``directory_not_ours`` (its ``checkpoint.json`` was not written by this
            function), ``checkpoint_busy``, ``invalid_argument``, ``model_on_meta``, ``model_is_lazy``,
            ``model_is_sharded`` (by TorchRec alone), ``model_parallel_inside`` (around a part of the model),
            ``several_process_groups``, ``no_process_group`` (it was destroyed), ``optimizer_not_supported`` (also for
            an optimizer that updates parameters outside the model), ``value_not_supported``, ``other_rank_failed``.
            Raised on all ranks.
    """
    root, path, peers = checked_arguments(model, directory, "save_checkpoint")
    tensors = _contents(root, optimizer, peers)
    data = peers.agree(new_name)[0]
    what_to_do = "make room on the disk, or make the directory writable, and save again; a complete checkpoint is kept."
    with disk_errors("checkpoint_not_written", path, what_to_do):
        _write(path, tensors, data, peers)


def _write(path: Path, tensors: dict[str, Any], data: str, peers: Peers) -> None:
    with contextlib.ExitStack() as stack:  # the first rank holds the lock for all
        complete: list[Manifest] = []  # of a folder that may be valid by now

        def begin() -> None:
            if not path.is_dir():
                path.mkdir(parents=True, exist_ok=True)
                sync_directory(path.parent)  # a crash does not lose it
            stack.enter_context(locked(path, shared=False))
            if is_foreign(path):
                raise CheckpointError(
                    f"{path / MANIFEST} was not written by save_checkpoint.",
                    reason="directory_not_ours",
                    what_to_do="save to a different directory, or delete that file if it is not needed.",
                )
            with contextlib.suppress(CheckpointError):  # as long as no manifest says which folder is valid, all stay
                remove_leftovers(path, Manifest.read(path).data)

        def finish() -> None:
            for entry in SavedFolder(path / data).metadata.storage_data.values():
                if not (path / data / entry.relative_path).is_file():
                    raise FileNotFoundError(
                        f"{entry.relative_path} of another rank is not in {path / data} here: all ranks must name one "
                        "shared directory"
                    )
            complete.append(Manifest.of_folder(path / data))
            complete[0].switch(path)

        peers.first(begin)
        try:
            storage.write(path / data, tensors, peers.group)
            peers.first(finish)
        except BaseException:
            if peers.is_first and not complete:  # what is left otherwise, the next save deletes
                shutil.rmtree(path / data, ignore_errors=True)
            raise
        peers.first(lambda: remove_leftovers(path, keep=data))


def _contents(model: nn.Module, optimizer: Any, peers: Peers) -> dict[str, Any]:
    """Everything that this rank writes, by name; nothing is copied. What all ranks have, the first one writes.
    Collective.
    """
    written: dict[str, Any] = {}
    settings: dict[str, Any] = {}

    def describe() -> dict[str, Any] | None:
        inner = unwrap_optimizer(optimizer)
        if inner is not None:
            reset_before_saving(inner)
        for _, module in collections_by_prefix(model, ShardedCollection):
            module.prepare_to_save()
        state = model.state_dict()
        settings["extra_state"] = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        for name, value in state.items():
            if isinstance(value, ShardedTensor):
                written[MODEL + name] = value
            elif isinstance(value, Tensor):
                check_tensor(MODEL + name, value)
                written.update({MODEL + name: value.detach()} if peers.is_first else {})
        ordinary: dict[str, Any] = {}
        of_backward: dict[str, Any] = {}
        settings["in_backward"] = describe_in_backward(model, peers.is_first, of_backward)
        described = None if inner is None else describe_optimizer(inner, model, peers.is_first, ordinary)
        written.update({**ordinary, **of_backward})  # both may hold a parameter: the one in backward steps it
        return described

    all_ranks = peers.agree(describe)

    def join() -> None:
        described = [values for values in all_ranks if values is not None]
        if described and len(described) < len(all_ranks):
            raise CheckpointError(
                f"only {len(described)} of {len(all_ranks)} ranks have an ordinary optimizer to save.",
                reason="invalid_argument",
                what_to_do="pass the same optimizer= on all ranks, or none on any.",
            )
        settings["optimizer"] = join_described(described) if described else None
        settings["warm_ups"] = {place: list(part._get_warmup_state()) for place, part in warm_ups(optimizer).items()}
        written[SETTINGS] = pack_settings(settings)

    peers.first(join)
    return written
