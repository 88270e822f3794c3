"""Work that an interrupt of the main thread cannot leave half done."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch

from recfx.lowering.step.to_the_end import to_the_end


class Work:
    """Begins, takes a while, and ends."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self) -> None:
        self.told.append("begins")
        time.sleep(0.02)
        self.told.append("ends")


@pytest.mark.parametrize(("starts", "waits"), [(False, 0.0), (True, 0.0), (True, 0.01)])
def test_an_interrupt_before_it_begins_or_while_it_does(
    monkeypatch: pytest.MonkeyPatch, starts: bool, waits: float
) -> None:
    start = _thread.start_new_thread

    def interrupted(*arguments: Any) -> None:
        if starts:
            start(*arguments)
        time.sleep(waits)
        raise KeyboardInterrupt

    monkeypatch.setattr(_thread, "start_new_thread", interrupted)
    work = Work()
    with pytest.raises(KeyboardInterrupt):
        to_the_end(work)
    left = list(work.told)
    time.sleep(0.05)
    assert work.told == left
    assert left == ["begins", "ends"] if waits else left in ([], ["begins", "ends"])


def test_signals_while_it_runs() -> None:
    work = Work()

    def interrupted() -> None:
        for _ in range(3):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            work()

    with pytest.raises(KeyboardInterrupt):
        to_the_end(interrupted)
    assert work.told == ["begins", "ends"] * 3


@pytest.mark.timeout(60)  # seconds: it would wait for ever
def test_an_interrupt_after_any_call_that_python_makes() -> None:
    """Also in the middle of Python's own locks, where one from outside comes once in a thousand times."""
    left, interrupted = 0, 0

    def interrupt(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        left -= event in ("call", "c_return")
        if left == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    while left == 0:
        work, left = Work(), interrupted + 1
        sys.setprofile(interrupt)
        try:
            to_the_end(work)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.setprofile(None)
        assert work.told in ([], ["begins", "ends"])
    assert work.told == ["begins", "ends"]
    assert interrupted > 3


def test_an_error_of_the_work_is_raised() -> None:
    def fail() -> None:
        raise MemoryError("none left")

    with pytest.raises(MemoryError, match="none left"):
        to_the_end(fail)


def test_it_runs_without_autograd_and_in_its_own_thread_only_for_the_main_one() -> None:
    seen = []

    def look() -> None:
        seen.append((threading.get_ident(), torch.is_grad_enabled()))

    to_the_end(look)
    other = threading.Thread(target=to_the_end, args=(look,))
    other.start()
    other.join(60)
    (first, without), second = seen
    assert first != threading.get_ident()
    assert not without
    assert second == (other.ident, True)
