"""How much work a call does, counted and not timed: the count is the same on every machine, busy or not."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import recfx

_RECFX = str(Path(recfx.__file__).parent)
_NOT_COUNTED = (str(Path("torch", "nn", "modules", "module.py")), f"{os.sep}sympy{os.sep}")


@functools.cache
def _is_counted(file: str) -> bool:
    return not any(part in file for part in _NOT_COUNTED)


class CountedName(str):
    """A name whose comparisons are calls, and therefore counted: searches in tuples of names show as well."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)


def work_of(function: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's, and lines run inside recfx, loops in one line included.

    What ``nn.Module.load_state_dict`` does by itself is left out: it looks at all keys for every child module. So is
    sympy, which sorts and caches what it was given before.
    """
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event in ("call", "c_call") and _is_counted(frame.f_code.co_filename):
            count += 1

    def trace_lines(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += 1
        return trace_lines

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        return trace_lines if frame.f_code.co_filename.startswith(_RECFX) else None

    before = sys.gettrace(), sys.getprofile()
    gc.collect()
    gc.disable()  # what it collects may be anybody's, and be told so
    sys.settrace(trace)
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before[1])
        sys.settrace(before[0])
        gc.enable()
    return count
