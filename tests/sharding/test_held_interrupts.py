"""Ctrl-C that is kept: when it is raised, and that none is lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from recfx.collections.sharding.held_interrupts import held_interrupts, interrupts, raise_held


@pytest.fixture(autouse=True)
def raised_by_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def until_the_end(reached: list[str]) -> None:
    with held_interrupts():
        ctrl_c()
        reached.append("kept")
        with interrupts(allowed=False):
            reached.append("still kept")


def until_it_is_allowed(reached: list[str]) -> None:
    with held_interrupts():
        ctrl_c()
        reached.append("kept")
        with interrupts(allowed=True):
            reached.append("not reached")


def while_it_is_allowed(reached: list[str]) -> None:
    with held_interrupts(), interrupts(allowed=True):
        reached.append("allowed")
        ctrl_c()
        reached.append("not reached")


def until_it_is_allowed_again(reached: list[str]) -> None:
    with held_interrupts(), interrupts(allowed=True):
        with interrupts(allowed=False):
            ctrl_c()
            reached.append("kept")
        reached.append("not reached")


def until_it_is_no_longer_held(reached: list[str]) -> None:
    with held_interrupts(), interrupts(allowed=True):
        with held_interrupts():
            ctrl_c()
            reached.append("kept")
        reached.append("not reached")


def until_asked(reached: list[str]) -> None:
    with held_interrupts():
        ctrl_c()
        reached.append("kept")
        raise_held()
        reached.append("not reached")


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (until_the_end, ["kept", "still kept"]),
        (until_it_is_allowed, ["kept"]),
        (while_it_is_allowed, ["allowed"]),
        (until_it_is_allowed_again, ["kept"]),
        (until_it_is_no_longer_held, ["kept"]),
        (until_asked, ["kept"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_when_it_is_raised(function: Callable[[list[str]], None], expected: list[str]) -> None:
    reached: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        function(reached)
    assert reached == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_ctrl_c_nothing_is_raised() -> None:
    with held_interrupts():
        raise_held()
        with interrupts(allowed=True):
            pass
    raise_held()
    with interrupts(allowed=True):
        pass
