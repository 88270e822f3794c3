"""Whether a process was started as recfx's own command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath


def own_arguments(command: Sequence[str], arguments: Sequence[str]) -> list[str] | None:
    """What follows ``python -m recfx``, a module of recfx, or ``recfx``; ``None`` for another program.

    Args:
        command: of the process with Python's own options, as ``sys.orig_argv`` has it.
        arguments: those of the program, as ``sys.argv`` has them while Python looks for it: the first is ``-m``, or
            its path.
    """
    program, *rest = arguments or [""]
    if program != "-m":
        return rest if PurePath(program).name == "recfx" else None
    return rest if re.fullmatch(r"(-\w*m)?recfx(\.\w+)*", command[-1 - len(rest)]) else None
