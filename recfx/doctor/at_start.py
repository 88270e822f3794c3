"""The first that ``import recfx`` imports: whether the packages that are installed fit. They are not imported for it.

``python -m recfx doctor`` then reports what is missing. That is the first day of many: torch is installed with
torch_npu, CANN's environment script was not sourced, and ``import torch`` fails.
"""

import importlib
import os
import re
import sys
from collections.abc import Sequence

from recfx.doctor.packages import DEVICES, cann, device_of, look, packages, refused
from recfx.doctor.report import Report
from recfx.versions.sets import MODULES


def report_what_is_missing(arguments: Sequence[str]) -> None:
    """Print what is installed for the doctor's ``--device``, and end the process with status 1."""
    import argparse  # here, because every program that imports recfx would wait for it

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


_command = re.search(r"(?:-\w*m ?|[/\\])recfx(?: (.*))?$", " ".join(sys.orig_argv))  # of the command line of recfx
_arguments, _refused = (_command[1] or "").split() if _command else [], refused()
if _arguments[:1] == ["doctor"] and (_refused or not all(map(_is_importable, MODULES))):
    report_what_is_missing(_arguments[1:])
if _refused is not None:
    if _command is not None:
        sys.exit(f"recfx: {_refused}")
    raise _refused
