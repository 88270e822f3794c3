"""A rank that fails in the middle of a call must not go on: its peers wait for the rest of that call.

An error before ids are sent (a batch that does not fit) is raised on all ranks, because ``marks`` tells them about it,
and they stay in step. After that, a rank that fails is alone. Collectives are matched only by their order: if it
started its next batch, its ids would arrive where peers wait for other messages. So it sends nothing more in that
process group, and the peers' collectives fail, at the latest when the group's timeout expires.
"""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.utils.checkpoint import _StopRecomputationError

from recfx.errors import OutOfStepError, RecfxError

RANK_LOST = "rank_lost"
_LOST = re.compile(r"\bgloo/|Connection (closed|reset) by peer|caused pair closure|\bHCCL\b", re.IGNORECASE)
_failed: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()  # what failed


def _is_of_group(error: BaseException) -> bool:
    """Whether a process group raised it because of another rank; gloo and hccl raise a ``RuntimeError``."""
    if not isinstance(error, RuntimeError) or isinstance(error, RecfxError):
        return False
    return isinstance(error, dist.DistError) or _LOST.search(str(error)) is not None


class LostRanks:
    """A context in which what a process group raises if another rank has ended, or does not answer, is ``rank_lost``.

    After that, this rank sends nothing more in ``group``. It can be entered again, also from within.

    Args:
        group: the group in which this rank gives up; None if that is left to a context around this one.
        collection: fully qualified name, for messages.
        in_backward: while gradients of ``collection`` travel.

    Raises:
        OutOfStepError: ``rank_lost``.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, collection: str = "", in_backward: bool = False) -> None:
        self.group, self.collection, self._in_backward = group, collection, in_backward

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, OutOfStepError) and error.reason == RANK_LOST:
            self._give_up(error)
        elif _is_of_group(error):
            lost = self._lost(error)
            self._give_up(lost)
            raise lost from error

    def _give_up(self, error: BaseException) -> None:
        if self.group is not None:
            give_up(self.group, self.collection, error)

    def _lost(self, error: BaseException) -> OutOfStepError:
        in_backward = self._in_backward
        return OutOfStepError(
            f"{'in the backward of the collection, ' if in_backward else ''}another rank has ended, or has not "
            f"answered in time ({str(error).strip().splitlines()[0]}).",
            reason=RANK_LOST,
            module_path=self.collection,
            what_to_do="see that rank's own error. If it has none, or one of the process group (a timeout, a wrong "
            f"size), the loss may leave {'this or another' if in_backward else 'a'} collection out on some ranks: "
            "add 0 * output.sum() to it on every rank; or its data ended early: give every rank the same number of "
            "batches. Start all ranks again from the last checkpoint.",
        )


class InStep(LostRanks):
    """A context around a step in which the other ranks of ``group`` take part.

    After any error in it, this rank sends nothing more, except for errors that leave all ranks in step:
    ``OutOfStepError``s, those that all ranks raise, and what ``torch.utils.checkpoint`` raises when it has all that the
    backward needs of a call that it repeats, after the same operator on each rank.
    """

    def _failed(self, error: BaseException) -> None:
        super()._failed(error)
        if isinstance(error, (OutOfStepError, _StopRecomputationError)):
            return
        if not (isinstance(error, RecfxError) and error.by_all_ranks):
            self._give_up(error)

    def refuse_if_failed(self) -> None:
        """Check that this rank may still send.

        Raises:
            OutOfStepError: ``out_of_step``.
        """
        failed = None if self.group is None else _failed.get(self.group)
        if failed is not None:
            raise OutOfStepError(
                f"an earlier step failed on this rank after other ranks had begun it, too ({failed}).",
                reason="out_of_step",
                module_path=self.collection,
                what_to_do="end this process, or destroy the process group on every rank; start again from the last "
                "checkpoint.",
            )


def has_failed(group: dist.ProcessGroup) -> bool:
    """Whether this rank sends nothing more in ``group``."""
    return group in _failed


def give_up(group: dist.ProcessGroup, collection: str, error: BaseException) -> None:
    """Send nothing more in ``group`` from this rank."""
    if group.size() > 1:  # with one rank, nothing waits
        _failed.setdefault(group, f"{collection or 'the root'}: {type(error).__name__}: {error}")
