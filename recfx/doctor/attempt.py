"""The one place where whatever goes wrong in a check becomes its result."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Failure:
    """What a check raised.

    Args:
        message: in one line.
        traceback: where.
    """

    message: str
    traceback: str


def attempt(check: Callable[[], object]) -> Failure | None:
    """Run a check; what it raises is a result, and not an error of the doctor.

    A compiler of kernels that is new to a device fails in any way: with an error of its own class, with one of Python
    inside of it, with an assertion. To find that is what the check is for, so every ``Exception`` is caught. Ctrl-C is
    none.
    """
    try:
        check()
    except Exception as error:
        text = next(iter(str(error).strip().splitlines()), "")
        return Failure(f"{type(error).__name__}: {text}"[:500], "".join(traceback.format_exception(error)))
    return None
