"""A rank that fails in the middle of a call must not go on: its peers wait for the rest of that call.

An error before ids are sent (a batch that does not fit) is raised on all ranks, because ``marks`` tells them about it,
and they stay in step. After that, a rank that fails is alone. Collectives are matched only by their order: if it
started its next batch, its ids would arrive where peers wait for other messages. So it sends nothing more in that
process group, and the peers' collectives fail, at the latest when the group's timeout expires.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.utils.checkpoint import _StopRecomputationError

from recfx.errors import OutOfStepError, RecfxError

RANK_LOST = "rank_lost"
_LOST = re.compile(r"\bgloo/|Connection (closed|reset) by peer|caused pair closure|\bHCCL\b", re.IGNORECASE)
_failed: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()  # what failed


@contextlib.contextmanager
def in_step(group: dist.ProcessGroup, collection: str) -> Iterator[None]:
    """Guard a step in which the other ranks of ``group`` take part. Errors that all of them raise
    leave them in step: ``OutOfStepError``s, those that say so, and what ``torch.utils.checkpoint`` raises when it has
    all that the backward needs of a call that it repeats: after the same operator on each rank.

    Raises:
        OutOfStepError: ``rank_lost``.
    """
    try:
        with lost_ranks(collection, group):
            yield
    except (OutOfStepError, _StopRecomputationError):
        raise
    except BaseException as error:
        if not (isinstance(error, RecfxError) and error.by_all_ranks):
            give_up(group, collection, error)
        raise


@contextlib.contextmanager
def lost_ranks(
    collection: str = "", group: dist.ProcessGroup | None = None, in_backward: bool = False
) -> Iterator[None]:
    """Turn what a process group raises if another rank has ended, or does not answer, into an error of recfx.

    After that, this rank sends nothing more in ``group``. ``in_backward``: while gradients of ``collection`` travel.

    Raises:
        OutOfStepError: ``rank_lost``.
    """
    try:
        yield
    except OutOfStepError as error:
        if error.reason == RANK_LOST and group is not None:
            give_up(group, collection, error)
        raise
    except RuntimeError as error:  # what gloo and hccl raise is just that
        if not isinstance(error, RecfxError) and (isinstance(error, dist.DistError) or _LOST.search(str(error))):
            lost = OutOfStepError(
                f"{'in the backward of the collection, ' if in_backward else ''}another rank has ended, or has not "
                f"answered in time ({str(error).strip().splitlines()[0]}).",
                reason=RANK_LOST,
                module_path=collection,
                what_to_do="see that rank's own error. If it has none, or one of the process group (a timeout, a wrong "
                f"size), the loss may leave {'this or another' if in_backward else 'a'} collection out on some ranks: "
                "add 0 * output.sum() to it on every rank; or its data ended early: give every rank the same number of "
                "batches. Start all ranks again from the last checkpoint.",
            )
            if group is not None:
                give_up(group, collection, lost)
            raise lost from error
        raise


def has_failed(group: dist.ProcessGroup) -> bool:
    """Whether this rank sends nothing more in ``group``."""
    return group in _failed


def refuse_out_of_step(group: dist.ProcessGroup, collection: str) -> None:
    """Check that this rank may still send.

    Raises:
        OutOfStepError: ``out_of_step``.
    """
    failed = _failed.get(group)
    if failed is not None:
        raise OutOfStepError(
            f"an earlier step failed on this rank after other ranks had begun it, too ({failed}).",
            reason="out_of_step",
            module_path=collection,
            what_to_do="end this process, or destroy the process group on every rank; start again from the last "
            "checkpoint.",
        )


def give_up(group: dist.ProcessGroup, collection: str, error: BaseException) -> None:
    """Send nothing more in ``group`` from this rank."""
    if group.size() > 1:  # with one rank, nothing waits
        _failed.setdefault(group, f"{collection or 'the root'}: {type(error).__name__}: {error}")
