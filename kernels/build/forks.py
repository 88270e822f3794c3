"""Forked processes: OpenMP's threads stay behind in the parent, and GNU OpenMP in the child waits for them forever.

recfx's own operators run on one thread in a child (``csrc/build/parallel.h``). Torch's operators would hang there if
the parent had ever run one on several threads. Workers of a ``DataLoader`` limit torch to one thread themselves.
"""

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
    """On the first call in a forked process, limit torch to one thread."""
    global _is_new_child
    if _is_new_child:
        _is_new_child = False
        if torch.get_num_threads() > 1:
            torch.set_num_threads(1)
            _logger.warning(
                "this process was forked and uses an index: torch is limited to one thread here, because OpenMP would "
                "wait for threads of the parent. To use several threads, start processes with the method 'spawn'."
            )
