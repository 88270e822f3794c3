"""Whether a process was started as recfx's own command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath


def own_arguments(command: Sequence[str]) -> list[str] | None:
    """What follows ``python -m recfx`` or ``recfx``; ``None`` for another program.

    Args:
        command: of the process, as ``sys.orig_argv`` has it.
    """
    words = list(command)
    if "-m" in words:
        place = words.index("-m") + 1
        return words[place + 1 :] if words[place : place + 1] == ["recfx"] else None
    return words[2:] if words[1:] and PurePath(words[1]).name == "recfx" else None
