"""An interrupt at any place of recfx's code: where Python looks for signals, counted."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import recfx
from recfx import kernels, lowering

_OURS = tuple(str(Path(package.__file__ or "").parent) for package in (recfx, kernels, lowering))


class _Counter:
    """Python runs signal handlers when a function begins and after calls of C functions: these are the places.

    Each counts once, however often it is passed.
    """

    def __init__(self, at: int | None, error: type[BaseException]) -> None:
        self.at, self.error = at, error
        self.seen: set[tuple[CodeType, int, str]] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event not in ("call", "c_return") or not code.co_filename.startswith(_OURS):
            return
        if code.co_flags & inspect.CO_GENERATOR:  # what is raised while one is closed goes nowhere
            return
        count = len(self.seen)
        self.seen.add((code, frame.f_lasti, event))
        if len(self.seen) > count == (self.at or 0) - 1:
            sys.setprofile(None)
            raise self.error


def places(run: Callable[[], object]) -> int:
    """How many places there are in ``run()``."""
    counter = _Counter(None, KeyboardInterrupt)
    sys.setprofile(counter)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(counter.seen)


def interrupt(run: Callable[[], object], at: int, error: type[BaseException] = KeyboardInterrupt) -> bool:
    """Raise ``error`` at one place of ``run()``, counted from 1. Returns whether it came out of it."""
    sys.setprofile(_Counter(at, error))
    try:
        run()
    except error:
        return True
    finally:
        sys.setprofile(None)
    return False
