"""The ranks that save or load one checkpoint together: an error on one of them is raised on all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from recfx.checkpoint.directory import cause_of
from recfx.collections.sharding.ranks_agree import group_of_model, on_all_ranks
from recfx.collections.wrappers import unwrap
from recfx.errors import CheckpointError, RecfxError, type_of

_Result = TypeVar("_Result")


class Peers:
    """All ranks of a process group, or, without one, this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.is_first = self.rank == 0

    def agree(self, function: Callable[[], _Result]) -> list[_Result]:
        """Call ``function`` on all ranks, and return what each of them returned. Collective; ``function`` must not be.

        Raised is its error on this rank, otherwise that of the first rank where it failed (as ``other_rank_failed`` if
        it is neither an error of recfx nor of the disk).
        """
        return on_all_ranks(self.group, function, self._as_sent)

    def first(self, function: Callable[[], _Result]) -> _Result | None:
        """Call ``function`` on the first rank only; its error is raised on all. Collective."""
        return self.agree(lambda: function() if self.is_first else None)[0]

    def _as_sent(self, error: BaseException) -> Exception:
        cause = cause_of(error)
        if isinstance(error, RecfxError):
            return error
        if isinstance(cause, OSError):
            return OSError(f"rank {self.rank}: {cause}")
        message = f"rank {self.rank} failed: {type(cause).__name__}: {cause}"
        return CheckpointError(message, reason="other_rank_failed", what_to_do="see the error on that rank.")


def checked_arguments(model: nn.Module, directory: object, call: str) -> tuple[nn.Module, Path, Peers]:
    """The model without wrappers, the directory, and the ranks that hold the model and make this call. Collective."""
    root = unwrap(model)
    for path, part in root.named_modules():
        if path and isinstance(part, DistributedModelParallel):
            raise CheckpointError(
                "DistributedModelParallel is around a part of the model, where load_state_dict of the whole stops.",
                reason="model_parallel_inside",
                module_path=path,
                what_to_do="put it around the whole model, or save and load that part.",
            )
    peers = Peers(
        group_of_model(
            root,
            CheckpointError,
            call=call,
            if_several="save and load the collections one by one, each in its own directory.",
            if_sharded_alone="convert the model before it is sharded, or use torch.distributed.checkpoint.",
        )
    )

    def named() -> str:
        name = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
        if isinstance(name, str) and name and "\0" not in name:
            return name
        raise CheckpointError(
            f"directory is {directory!r}." if isinstance(directory, str) else f"directory is {type_of(directory)}.",
            reason="invalid_argument",
            what_to_do="pass the path of a directory, as a str or a pathlib.Path.",
        )

    return root, Path(peers.agree(named)[peers.rank]), peers
