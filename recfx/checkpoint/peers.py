"""The ranks that save or load one checkpoint together: an error on one of them is raised on all.

The arguments of ``save_checkpoint`` and ``load_checkpoint`` are checked here as well, before anything else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.distributed.model_parallel import DistributedModelParallel

from recfx.checkpoint.directory import cause_of
from recfx.collections.sharding.ranks_agree import group_of_model, on_all_ranks
from recfx.collections.wrappers import unwrap
from recfx.errors import CheckpointError, RecfxError, type_of

_Result = TypeVar("_Result")


class Peers:
    """All ranks of a process group, or this process alone.

    Args:
        group: the process group; None for this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.is_first = group is None or group.rank() == 0

    @classmethod
    def of(cls, model: nn.Module, call: str) -> Peers:
        """The ranks that hold a sharded model's tables and make this call; only this process if nothing is sharded.

        Raises:
            CheckpointError: ``model_is_sharded`` (by TorchRec alone), ``several_process_groups``,
                ``no_process_group``.
        """
        group = group_of_model(
            model,
            CheckpointError,
            call=call,
            if_several="save and load the collections one by one, each in its own directory.",
            if_sharded_alone="convert the model before it is sharded, or use torch.distributed.checkpoint.",
        )
        return cls(group)

    def agree(self, function: Callable[[], _Result]) -> list[_Result]:
        """Call ``function`` on all ranks, and return what each of them returned. Collective; ``function`` must not be.

        Raises:
            Exception: the error of ``function`` on this rank, otherwise that of the first rank where it failed (as
                ``CheckpointError`` ``other_rank_failed`` if it is neither an error of recfx nor of the disk).
        """
        rank = 0 if self.group is None else self.group.rank()
        return on_all_ranks(self.group, function, lambda error: _as_sent(error, rank))

    def first(self, function: Callable[[], _Result]) -> _Result | None:
        """Call ``function`` on the first rank only; its error is raised on all. Collective."""
        return self.agree(lambda: function() if self.is_first else None)[0]


def _as_sent(error: BaseException, rank: int) -> Exception:
    if isinstance(error, RecfxError):
        return error
    if isinstance(error, OSError):
        return OSError(f"rank {rank}: {error}")
    cause = cause_of(error)
    if isinstance(error, CheckpointException) and isinstance(cause, Exception):
        return OSError(f"rank {rank}: {cause}")
    return CheckpointError(
        f"rank {rank} failed: {type(error).__name__}: {error}",
        reason="other_rank_failed",
        what_to_do="see the error on that rank.",
    )


def checked_model(model: nn.Module, call: str) -> tuple[nn.Module, Peers]:
    """The model without wrappers, and the ranks that hold it together and make this call.

    Raises:
        CheckpointError: ``model_parallel_inside``, or what ``Peers.of`` says.
    """
    root = unwrap(model)
    for path, part in root.named_modules():
        if path and isinstance(part, DistributedModelParallel):
            raise CheckpointError(
                "DistributedModelParallel is around a part of the model, where load_state_dict of the whole stops.",
                reason="model_parallel_inside",
                module_path=path,
                what_to_do="put it around the whole model, or save and load that part.",
            )
    return root, Peers.of(root, call)


def checked_directory(directory: object, peers: Peers) -> tuple[Path, str]:
    """The directory as a path, and what to do if something fails because ranks have named different ones, unless they
    have not; machines may have one directory in different places. Collective: an error on one rank is raised on all.

    Raises:
        CheckpointError: ``invalid_argument``.
    """

    def check() -> str:
        path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
        if isinstance(path, str) and path and "\0" not in path:
            return str(Path(path))
        problem = f"{path!r}, which cannot be the name of a directory" if isinstance(path, str) else type_of(directory)
        raise CheckpointError(
            f"directory is {problem}.",
            reason="invalid_argument",
            what_to_do="pass the path of a directory, as a str or a pathlib.Path.",
        )

    named = peers.agree(check)
    assert isinstance(directory, (str, os.PathLike))
    others = [f"rank {rank} named {path}" for rank, path in enumerate(named) if path != named[0]]
    if_different = f"name one directory on all ranks: rank 0 named {named[0]}, but {others[0]}." if others else ""
    return Path(directory), if_different
