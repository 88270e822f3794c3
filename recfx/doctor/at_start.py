"""The first that ``import recfx`` imports: whether the packages that are installed fit. They are not imported for it.

``python -m recfx doctor`` then reports what is missing. That is the first day of many: torch is installed with
torch_npu, CANN's environment script was not sourced, and ``import torch`` fails.
"""

import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import PurePath

from recfx.doctor.installed_set import device_of, look, refused
from recfx.versions.sets import MODULES


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


def report_what_is_missing(arguments: Sequence[str]) -> None:
    """Print what is installed for the doctor's ``--device``, and end the process with status 1."""
    import argparse  # here, because every program that imports recfx would wait for these

    from recfx.doctor.packages import DEVICES, cann, packages
    from recfx.doctor.report import Report

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default=device_of(look("torch")))
    parser.add_argument("--json", action="store_true")
    given, _ = parser.parse_known_args(arguments)
    kind = given.device.partition(":")[0]
    report = Report(given.device, stopped="Nothing was run: recfx cannot be imported here.")
    report.findings += packages(kind if kind in DEVICES else "cpu")
    report.findings += cann() if kind == "npu" else ()
    print(report.to_json() if given.json else report, flush=True)
    os._exit(1)  # libraries that were loaded in part may crash in an orderly end


def _is_importable(module: str) -> bool:
    environment = dict(os.environ)
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError):  # what does not fit fails in many ways
        os.environ.clear()
        os.environ.update(environment)  # while it loads extensions, torch tells its children not to
        return False
    return True


_refused, _arguments = refused(), own_arguments(sys.orig_argv, getattr(sys, "argv", []))
if _arguments is not None and _arguments[:1] == ["doctor"] and (_refused or not all(map(_is_importable, MODULES))):
    report_what_is_missing(_arguments[1:])
if _refused is not None:
    if _arguments is not None:
        sys.exit(f"recfx: {_refused}")
    raise _refused
