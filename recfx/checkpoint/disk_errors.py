"""Errors of the disk, as a ``CheckpointError``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from recfx.errors import CheckpointError


@contextmanager
def told_as(reason: str, path: Path, consequence: Callable[[], str], what_to_do: str) -> Iterator[None]:
    """Turn errors of the disk, and those that DCP wraps, into a ``CheckpointError``.

    Args:
        reason: the reason code.
        path: path of the checkpoint, for the message.
        consequence: says what state things are in now; called when something has failed.
        what_to_do: what the user can do.
    """
    try:
        yield
    except (OSError, CheckpointException) as error:
        cause = cause_of(error)
        if not isinstance(cause, Exception):  # DCP also wraps Ctrl-C
            raise cause from None
        text = str(cause) or type(cause).__name__
        message = f"{path}: {text}. {consequence()}"
        raise CheckpointError(message, reason=reason, what_to_do=what_to_do) from cause


def cause_of(error: BaseException) -> BaseException:
    """The error that DCP has wrapped, or the error itself."""
    if isinstance(error, CheckpointException):
        for failure, _ in error.failures.values():
            return cause_of(failure)
        return RuntimeError(str(error))
    return error
