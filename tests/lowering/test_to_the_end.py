"""Work that an interrupt of the main thread cannot leave half done."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from recfx.lowering._to_the_end import to_the_end


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
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if starts:
            start(thread)
        time.sleep(waits)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
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


def test_an_error_of_the_work_is_raised() -> None:
    def fail() -> None:
        raise MemoryError("none left")

    with pytest.raises(MemoryError, match="none left"):
        to_the_end(fail)


def test_it_runs_without_autograd_and_in_its_own_thread_only_for_the_main_one() -> None:
    seen = []

    def look() -> None:
        seen.append((threading.current_thread().name, torch.is_grad_enabled()))

    to_the_end(look)
    other = threading.Thread(target=to_the_end, args=(look,), name="other")
    other.start()
    other.join()
    assert seen == [("recfx fused step", False), ("other", True)]
