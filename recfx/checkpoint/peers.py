"""The ranks that save or load one checkpoint together: an error on one of them is raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from recfx.checkpoint.disk_errors import cause_of
from recfx.collections.sharding.model_group import group_of_model
from recfx.collections.sharding.ranks_agree import on_all_ranks
from recfx.errors import CheckpointError, RecfxError

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
    def of(cls, model: nn.Module) -> Peers:
        """The ranks that hold a sharded model's tables; only this process if nothing is sharded.

        Raises:
            CheckpointError: ``model_is_sharded`` (by TorchRec alone), ``several_process_groups``.
        """
        group = group_of_model(
            model,
            CheckpointError,
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
