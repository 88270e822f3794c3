"""Processes that were forked: OpenMP's threads stay behind in the parent, and GNU's OpenMP waits for them for ever.

recfx's own operators run on one thread in a child (``csrc/parallel.h``); torch's would hang there if the parent has
ever run one on several threads. Workers of a ``DataLoader`` set torch to one thread themselves.
"""

from __future__ import annotations

import logging
import os

import torch

_logger = logging.getLogger("recfx")
_is_new_child = False


def _in_child() -> None:
    global _is_new_child
    _is_new_child = True


os.register_at_fork(after_in_child=_in_child)


def use_one_thread_in_child() -> None:
    """In a process that was forked, set torch to one thread, the first time that this is called there."""
    global _is_new_child
    if _is_new_child:
        _is_new_child = False
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)
            _logger.warning(
                "this process was forked and uses an index: torch is set to one thread here, as OpenMP would wait for "
                "threads of the parent. Start processes with the method 'spawn' to have several threads."
            )
