"""``python -m recfx doctor`` where torch or TorchRec cannot be imported: what is installed is looked at all the same.

That is the first day of many: torch is installed with torch_npu, CANN's environment script was not sourced, and
``import torch`` fails. ``recfx/__init__.py`` imports ``at_start.py`` before it imports either.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from recfx.doctor.cann import cann
from recfx.doctor.installed_set import device_of, look
from recfx.doctor.packages import packages
from recfx.doctor.report import Report
from recfx.doctor.show import to_text
from recfx.doctor.write import stem_of, write
from recfx.versions.sets import MODULES

# Versions that do not fit each other fail in many ways.
_CANNOT_BE_IMPORTED = (ImportError, OSError, RuntimeError, AttributeError, TypeError)


def look_first(arguments: Sequence[str], is_refused: bool) -> None:
    """If ``import recfx`` would fail, report why and end the process.

    Args:
        arguments: of the doctor.
        is_refused: whether recfx refuses the versions that are installed. Otherwise, ``MODULES`` are imported.

    The exit status is 1 then.
    """
    if not is_refused and all(map(_is_importable, MODULES)):
        return
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default=device_of(look("torch")))
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--json", action="store_true")
    given, _ = parser.parse_known_args(arguments)
    kind = given.device.partition(":")[0]
    report = Report(given.device, stopped="Nothing was run: recfx cannot be imported here.")
    report.findings += packages(kind if kind in ("cuda", "npu") else "cpu")
    if kind == "npu":
        report.findings += cann()
    try:
        written = write(report, stem_of(given.out))
    except OSError as error:
        sys.exit(f"python -m recfx doctor: {error}")
    print(report.to_json() if given.json else f"{to_text(report)}\n\n{chr(10).join(map(str, written))}", flush=True)
    os._exit(1)  # libraries that were loaded in part may crash in an orderly end


def _is_importable(module: str) -> bool:
    environment = dict(os.environ)
    try:
        importlib.import_module(module)
    except _CANNOT_BE_IMPORTED:
        os.environ.clear()
        os.environ.update(environment)  # while it loads extensions, torch tells its children not to
        return False
    return True
