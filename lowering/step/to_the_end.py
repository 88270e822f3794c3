"""Runs work that must not be left half done.

Python raises Ctrl-C, and whatever else a signal handler raises, in the main thread alone; so such work has a thread of
its own, for which the main thread waits. An interrupt may come between any two steps of code that is written in Python,
such as that of ``threading.Thread.start`` and ``threading.Event.wait``, and leave a lock of theirs held for ever: here,
the main thread starts and waits by what Python itself is made of.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

import torch


def to_the_end(work: Callable[[], None]) -> None:
    """Run ``work``; if the main thread is interrupted, either it never begins, or the interrupt is raised after it.

    Args:
        work: runs without autograd, on the CPU: a stream of another device would be that of another thread.

    Raises:
        BaseException: what ``work`` raises, or the interrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    once = _Once(work)
    try:
        _thread.start_new_thread(once.run, ())
        once.wait()
    except BaseException:
        once.call_off_or_wait()
        raise
    if once.error is not None:
        raise once.error


class _Once:
    """Work that one thread begins, unless another one has called it off."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._decided = work, dict[str, str]()
        self._is_over = False
        self._ended = threading.Lock()  # held until then
        self._ended.acquire()
        self.error: BaseException | None = None

    def run(self) -> None:
        if self._decide("run") != "run":
            return
        try:
            with torch.no_grad():
                self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._is_over = True
            self._ended.release()

    def wait(self) -> None:
        """Wait until it is over. A thread that was given the lock and interrupted at once has nothing to wait for."""
        while not self._is_over:
            self._ended.acquire()

    def call_off_or_wait(self) -> None:
        """Afterwards, it is over, or it never begins."""
        while True:
            try:
                if self._decide("called off") == "run":
                    self.wait()
            except BaseException:  # the caller raises the first one
                continue
            return

    def _decide(self, proposal: str) -> str:
        return self._decided.setdefault("what", proposal)  # atomic, and the same whenever it is asked again
