"""A rank that fails in the middle of a call must not go on: its peers wait for the rest of that call.

What goes wrong before ids are sent (a batch that does not fit) goes wrong on all ranks alike, as ``marks`` tells them,
and they stay in step. Behind that a rank that fails is alone. Collectives are matched by their order alone: were it to
start its next batch, its ids would arrive where others of its messages are waited for. So nothing more is sent in that
process group: the peers' collectives fail, at the latest when the group's timeout is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch.distributed as dist

from recfx.errors import OutOfStepError

_failed: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()  # what failed


@contextlib.contextmanager
def in_step(group: dist.ProcessGroup, collection: str) -> Iterator[None]:
    """Around what the other ranks of ``group`` take part in. An ``OutOfStepError`` is one that all ranks raise."""
    try:
        yield
    except OutOfStepError:
        raise
    except BaseException as error:
        _note(group, collection, error)
        raise


def has_failed(group: dist.ProcessGroup) -> bool:
    """Whether this rank sends nothing more in ``group``."""
    return group in _failed


def refuse_out_of_step(group: dist.ProcessGroup, collection: str) -> None:
    """Before anything is sent.

    Raises:
        OutOfStepError: ``out_of_step``.
    """
    failed = _failed.get(group)
    if failed is not None:
        raise OutOfStepError(
            f"an earlier step failed on this rank when others had begun it too ({failed}).",
            reason="out_of_step",
            module_path=collection,
            what_to_do="end this process, or destroy the process group on every rank; start again from the last "
            "checkpoint.",
        )


def _note(group: dist.ProcessGroup, collection: str, error: BaseException) -> None:
    if group.size() > 1:  # nobody waits where there is one rank
        _failed.setdefault(group, f"{collection or 'the root'}: {type(error).__name__}: {error}")
