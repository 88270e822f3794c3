"""The packages and the CANN that recfx needs for a kind of device: which versions are there, and what mends them.

It imports no torch: it also works where torch, or CANN below it, cannot be imported.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from recfx.doctor.report import Finding, Status, missing, ok
from recfx.versions.sets import DEFAULT, PYTHONS, minor, nearest, set_of

DEVICES = ("cpu", "cuda", "npu")
CANN_FOLDERS = ("/usr/local/Ascend", "~/Ascend")
"""Where CANN's installer puts it for root, and for a user."""

_OLDEST_CANN = (8, 5)  # the first whose compiler takes what triton-ascend 3.2 lowers to
_VERSION_OF_CANN = re.compile(r"^\s*\w*version\w*\s*=\s*\[?\"?([0-9][\w.]*)", re.IGNORECASE | re.MULTILINE)
_ERROR = re.compile(r"[\w.]+(Error|Exception|Exit): ")


def packages(device: str) -> Iterator[Finding]:
    """The version of Python, and every package that is needed for ``"cpu"``, ``"cuda"`` or ``"npu"``."""
    version = ".".join(map(str, sys.version_info[:3]))
    if minor(version) in PYTHONS:
        yield ok("Python", version)
    else:
        yield missing("Python", version, f"make an environment with Python {PYTHONS[0]} to {PYTHONS[-1]}.")
    failures = {""}
    for name, module, fitting, install in needed(device, installed("torch")):
        failure = _import_failure(module)
        yield finding_of(name, fitting, install, failure if failure not in failures or not failure else "the same")
        failures.add(failure)


def needed(device: str, torch: str) -> list[tuple[str, str, str, str]]:
    """Each package in the order in which it is imported: distribution, module, the version that fits, as others of the
    same minor version do, and the command that installs it.

    ``torch`` is the version that is there, which may be a vendor's build, and stays if it fits.
    """
    fitting = set_of(torch)
    versions = replace(fitting, torch=torch) if fitting else nearest(torch or DEFAULT.torch)
    install = versions.install(device)
    fbgemm, torchrec = (versions.install(device, [name]) if fitting else install for name in ("fbgemm_gpu", "torchrec"))
    adapter = [("torch_npu", "torch_npu", versions.torch_npu, install)] if device == "npu" else []
    return [
        ("torch", "torch", versions.torch, install),
        *adapter,
        ("fbgemm-gpu" if device == "cuda" else "fbgemm-gpu-cpu", "fbgemm_gpu", versions.fbgemm, fbgemm),
        ("torchrec", "torchrec", versions.torchrec, torchrec),
    ]


def installed(name: str) -> str:
    """The version of a distribution; ``""`` if there is none of this name."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def finding_of(name: str, fitting: str, install: str, failure: str) -> Finding:
    """Whether a package is there in the version that fits; ``failure`` says why it cannot be imported, if so."""
    version = installed(name)
    if failure and not version:
        return missing(name, "not installed", install)
    if failure:
        return missing(name, f"{version}, but it cannot be imported: {failure}", _after(failure, install))
    if version and minor(version) != minor(fitting):
        return missing(name, f"{version}, which does not fit: {fitting} does", install)
    return ok(name, version or "importable, of unknown version")


def _import_failure(module: str) -> str:
    """Why a module cannot be imported, in one line; ``""`` if it can.

    What was not imported yet is tried in a process of its own: a module that failed once often cannot be tried again.
    """
    if module in sys.modules:
        return ""
    command = [sys.executable, "-c", f"import {module}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return ""
    errors = [line.strip() for line in done.stderr.splitlines() if _ERROR.match(line)]
    return textwrap.shorten("; ".join(reversed(errors[-2:])) or f"exit status {done.returncode}", 300)


def _after(failure: str, install: str) -> str:
    """What helps against a failed import."""
    if "backend extension: torch_npu" in failure or "libhccl" in failure or "libascend" in failure:
        return "source CANN's environment script, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use torch without NPUs."
    if "libcuda" in failure or "libtorch_cuda" in failure or "libnv" in failure:
        return f"it is a build for CUDA, which is not here: pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {install}"
    # With dependencies, this would replace the torch that others depend on.
    again = "--force-reinstall" if " torch==" in install else "--force-reinstall --no-deps"
    return install.replace("--no-deps ", "").replace("pip install", f"pip install {again}")


def cann(environment: Mapping[str, str] = os.environ, roots: tuple[str, ...] = CANN_FOLDERS) -> Iterator[Finding]:
    """CANN, its compiler, and triton-ascend, for the ``environment`` of a process.

    ``roots``: where CANN is looked for if the environment names no place.
    """
    home = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    scripts = [script for root in roots for script in sorted(Path(os.path.expanduser(root)).glob("*/set_env.sh"))]
    version = _version_of_cann(Path(home)) if home else ""
    if not home and scripts:
        yield missing("CANN", "installed, but its environment is not set", f"source {scripts[0]}")
    elif not home or (version and tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST_CANN):
        yield missing("CANN", f"{version or 'not found'}", "install CANN 8.5 or later, and source its set_env.sh")
    else:
        yield ok("CANN", f"{version or 'of unknown version'} in {home}")
    path = shutil.which("bishengir-compile", path=environment.get("PATH")) or environment.get(
        "TRITON_NPU_COMPILER_PATH"
    )
    if path:
        yield ok("Ascend compiler", path)
    else:
        yield missing("Ascend compiler", "no bishengir-compile on PATH", "source CANN's set_env.sh, which adds it")
    triton = installed("triton-ascend")
    if triton and not installed("triton"):
        yield ok("triton-ascend", triton)
    else:
        status = (
            Status.WARNING if triton else Status.MISSING
        )  # both are the package triton: the last one installed wins
        text = f"{triton}, beside triton {installed('triton')}" if triton else "not installed"
        install = f"pip uninstall -y triton triton-ascend && pip install triton-ascend=={DEFAULT.triton_ascend}"
        yield Finding("triton-ascend", status, text, install)


def _version_of_cann(home: Path) -> str:
    """The version that an installation writes down; ``""`` if it cannot be found."""
    for pattern in ("version.cfg", "*_install.info", "*/ascend_*_install.info", "version.info", "*/version.info"):
        for file in filter(Path.is_file, sorted(home.glob(pattern))):
            if os.access(file, os.R_OK) and (match := _VERSION_OF_CANN.search(file.read_text(errors="replace"))):
                return match[1]
    return ""
