"""A rank that fails in the middle of a step must not go on: its peers wait for the rest of that step.

Collectives are matched by their order alone. Were the rank to start its next batch, its ids would arrive where pooled
rows are waited for, and shorter messages are taken without an error. So nothing more is sent in that process group:
the peers' collectives fail, at the latest when the group's timeout is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch.distributed as dist

from recfx.errors import OutOfStepError

_failed: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()  # what failed
_openers: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()  # which collection has sent first of all


@contextlib.contextmanager
def in_step(group: dist.ProcessGroup, collection: str) -> Iterator[None]:
    """Around what the other ranks of ``group`` take part in."""
    try:
        yield
    except BaseException as error:
        _note(group, collection, error)
        raise


@contextlib.contextmanager
def sending(group: dist.ProcessGroup, collection: str) -> Iterator[None]:
    """Around what a collection sends first in a step.

    A batch that one collection refuses may be left out, if none has sent anything of it: the next one takes its place
    on this rank. Behind the collection that sends first, it cannot: the peers have that one's part of the batch.
    """
    opener = _openers.get(group)
    try:
        yield
    except BaseException as error:
        if opener not in (None, collection):
            _note(group, collection, error)
        raise
    _openers.setdefault(group, collection)


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
    _failed.setdefault(group, f"{collection or 'the root'}: {type(error).__name__}: {error}")
