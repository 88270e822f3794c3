"""Warnings of TorchRec's planner that say nothing to a user of recfx, and would hide those that do."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator

_LOGGED = {
    "": "Sharding spec not found for ",  # of every data-parallel table, which has none
    "torchrec.distributed.planner.storage_reservations": "There is a known issue with TorchRec's dense tensor size",
}
"""The beginning of each message, by the name of its logger."""

_WARNED = "HeuristicalStorageReservation is known to cause issues"  # it is the planner's own default


@contextlib.contextmanager
def without_noise() -> Iterator[None]:
    """Inside, this thread logs none of ``_LOGGED``; everything else is logged as outside."""
    thread, root = threading.get_ident(), logging.getLogger()

    def is_wanted(record: logging.LogRecord) -> bool:
        noise = _LOGGED["" if record.name == "root" else record.name]
        return record.thread != thread or not record.getMessage().startswith(noise)

    # Logging to the root logger configures it if it has no handler, for good.
    handler = logging.lastResort if not root.handlers else None
    loggers = [logging.getLogger(name) for name in _LOGGED]
    if handler is not None:
        root.addHandler(handler)
    for logger in loggers:
        logger.addFilter(is_wanted)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _WARNED, FutureWarning)
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_wanted)
        if handler is not None:
            root.removeHandler(handler)
