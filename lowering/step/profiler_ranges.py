"""Ranges in profiles, by the names of nodes: of the forward, and of what the backward does for a node later.

Without a profiler, all of this is the test of one flag.
"""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch.autograd import profiler

BACKWARD, STEP = " (backward)", " (step)"
"""What is appended to a node's name: its backward, and the fused step of the optimizers of its tables."""

_running = threading.local()
_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def is_profiling() -> bool:
    """Whether a profiler records."""
    return profiler._is_profiler_enabled


@contextlib.contextmanager
def forward_range(node: str) -> Iterator[None]:
    """The range of a node's forward; kernels that are called in it can learn the node's name.

    A node that stands for several has ranges of these inside of its own. What follows later is that of the whole.
    """
    before = running_node()
    _running.node = before or node
    try:
        with torch.profiler.record_function(node):
            yield
    finally:
        _running.node = before


def running_node() -> str:
    """The node whose ``forward_range`` this thread is in; ``""`` if there is none."""
    return getattr(_running, "node", "")


def later_range(node: str, what: str) -> AbstractContextManager[object]:
    """The range of what is done for a node after its forward; nothing if no profiler recorded that.

    ``node`` is what ``running_node`` gave in the forward, and ``what`` is ``BACKWARD`` or ``STEP``.
    """
    return torch.profiler.record_function(node + what) if node and is_profiling() else _NOTHING
