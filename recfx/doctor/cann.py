"""CANN, Ascend's runtime, and the driver below it: read from their files, so that it works without either."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from recfx.doctor.finding import Finding, missing, ok, warning
from recfx.doctor.packages import installed

INSTALLED_AT = ("/usr/local/Ascend", "~/Ascend")
"""Where CANN's installer puts it for root, and for a user."""

HOME = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
"""The variables that its environment script sets."""

OLDEST = (8, 5)
"""The first CANN whose compiler takes what triton-ascend 3.2 lowers to."""

_PYTHON_OF_TRITON_ASCEND = (3, 11)  # the newest that it has a wheel for
_VERSION = re.compile(r"^\s*\w*version\w*\s*=\s*\[?\"?([0-9][\w.]*)", re.IGNORECASE | re.MULTILINE)


def cann(environment: Mapping[str, str] = os.environ, roots: tuple[str, ...] = INSTALLED_AT) -> Iterator[Finding]:
    """CANN, its compiler, the driver, and whether their versions fit triton-ascend.

    Args:
        environment: of the process.
        roots: where CANN is looked for if the environment names no place.
    """
    folders = [Path(os.path.expanduser(root)) for root in roots]
    named = [Path(environment[name]) for name in HOME if environment.get(name)]
    if not named:
        scripts = [script for folder in folders for script in sorted(folder.glob("*/set_env.sh"))]
        if scripts:
            yield missing("CANN", "installed, but its environment is not set", f"source {scripts[0]}")
        else:
            yield missing("CANN", "not found", "install CANN 8.5 or later, and source its set_env.sh")
    else:
        yield _toolkit(named[0])
    yield _driver(folders)
    yield _compiler(environment)
    yield _triton_ascend()


def version_in(folder: Path) -> str:
    """The version that an installation of CANN writes down; ``""`` if it cannot be found."""
    for pattern in ("version.cfg", "*_install.info", "*/ascend_*_install.info", "version.info", "*/version.info"):
        for file in sorted(folder.glob(pattern)):
            with contextlib.suppress(OSError):  # some are for root alone
                if written := _VERSION.search(file.read_text(errors="replace")):
                    return written[1]
    return ""


def _toolkit(home: Path) -> Finding:
    if not home.is_dir():
        return missing("CANN", f"the environment names {home}, which is not there", "source the set_env.sh that is")
    version = version_in(home)
    if not version:
        return warning("CANN", f"in {home}, of unknown version", "check that it is 8.5 or later")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        return missing("CANN", f"{version} in {home}", "install CANN 8.5 or later, for its compiler")
    return ok("CANN", f"{version} in {home}")


def _driver(folders: list[Path]) -> Finding:
    for folder in folders:
        if (folder / "driver").is_dir():
            return ok("Ascend driver", version_in(folder / "driver") or f"in {folder / 'driver'}")
    return warning("Ascend driver", "not found", "run npu-smi info on the host; in a container, mount the driver")


def _compiler(environment: Mapping[str, str]) -> Finding:
    path = shutil.which("bishengir-compile", path=environment.get("PATH"))
    if path or environment.get("TRITON_NPU_COMPILER_PATH"):
        return ok("Ascend compiler", path or environment["TRITON_NPU_COMPILER_PATH"])
    return missing("Ascend compiler", "no bishengir-compile on PATH", "source CANN's set_env.sh, which adds it")


def _triton_ascend() -> Finding:
    version = installed("triton-ascend")
    if not version:
        return missing("triton-ascend", "not installed", "pip uninstall triton; pip install triton-ascend==3.2.0")
    if installed("triton"):
        return warning(
            "triton-ascend",
            f"{version}, beside triton {installed('triton')}: both are the package triton, the last one installed wins",
            "pip uninstall triton triton-ascend; pip install triton-ascend",
        )
    if sys.version_info[:2] > _PYTHON_OF_TRITON_ASCEND:
        return warning("triton-ascend", f"{version}, made for Python 3.11 at most", "use Python 3.11")
    return ok("triton-ascend", version)
