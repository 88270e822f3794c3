"""The one place where whatever goes wrong in a check becomes its result."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """What came of a check.

    Args:
        message: what is wrong, in one line; ``""`` if nothing is.
        traceback: of what was raised, if anything was.
    """

    message: str
    traceback: str


def attempt(check: Callable[[], str | None]) -> Failure:
    """Run a check, which returns what is wrong; what it raises is a result, too, and not an error of the doctor.

    A compiler of kernels that is new to a device fails in any way: with an error of its own class, with one of Python
    inside of it, with an assertion. To find that is what the check is for, so every ``Exception`` is caught. Ctrl-C is
    none.
    """
    try:
        return Failure(check() or "", "")
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        return Failure(f"{type(error).__name__}: {text}"[:500], "".join(traceback.format_exception(error)))
