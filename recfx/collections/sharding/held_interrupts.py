"""Ctrl-C that is kept until it can be raised: where other ranks can be told, and not in the middle of an exchange.

A rank that left an exchange would leave the others waiting, or let them take one message for another; one that left the
making of a process group, a part of it; and a trace that was left while torch.fx takes back what it has patched would
leave ``nn.Module`` patched for the whole process.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class _Held:
    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.has_come = False
        self.is_allowed = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        if self.is_allowed:
            self.raise_now(frame)

    def raise_now(self, frame: FrameType | None = None) -> None:
        if self.has_come:
            self.has_come = False
            self.handler(signal.SIGINT, frame)


_held: _Held | None = None


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Keep Ctrl-C until ``raise_held``, or until the end. Does nothing in other threads than the main one."""
    global _held
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    if _held is not None:
        with interrupts(allowed=False):
            yield
        return
    interrupt = _held = _Held(handler)
    signal.signal(signal.SIGINT, interrupt.on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        _held = None
        interrupt.raise_now()


def raise_held() -> None:
    """Raise the Ctrl-C that was kept, if there is one."""
    if _held is not None:
        _held.raise_now()


@contextlib.contextmanager
def interrupts(allowed: bool) -> Iterator[None]:
    """Raise Ctrl-C as soon as it comes, or keep it again."""
    interrupt = _held
    if interrupt is None:
        yield
        return
    before, interrupt.is_allowed = interrupt.is_allowed, allowed
    try:
        if allowed:
            interrupt.raise_now()
        yield
    finally:
        interrupt.is_allowed = before
    if before:
        interrupt.raise_now()
