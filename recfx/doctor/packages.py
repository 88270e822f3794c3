"""The Python packages that recfx needs for a kind of device: which versions are there, and whether they can be used."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from recfx.doctor.finding import Finding, missing, ok, warning

_ERROR = re.compile(r"[\w.]+(Error|Exception|Exit): ")

PYTHON = ((3, 10), (3, 14))
"""The first version that recfx runs on, and the first that it does not."""


@dataclass(frozen=True)
class Package:
    """A package whose version is pinned, because it is built for those of others.

    Args:
        name: of the distribution.
        module: what is imported; ``""``: nothing, it only installs others.
        version: the one that fits.
        install: what installs it, after ``pip install``.
    """

    name: str
    module: str
    version: str
    install: str


_TORCH = Package("torch", "torch", "2.13.0", "torch==2.13.0")
_TORCHREC = Package("torchrec", "torchrec", "1.8.0", "torchrec==1.8.0")
_STAND_IN = "./.packaging/fbgemm-gpu fbgemm-gpu-cpu==1.8.0"
_FBGEMM_CPU = Package("fbgemm-gpu-cpu", "fbgemm_gpu", "1.8.0", _STAND_IN)
_FBGEMM_STAND_IN = Package("fbgemm-gpu", "", "1.8.0+cpu", _STAND_IN)
_FBGEMM_CUDA = Package("fbgemm-gpu", "fbgemm_gpu", "1.8.0", "fbgemm-gpu==1.8.0")
_TORCH_NPU = Package("torch_npu", "torch_npu", "2.13.0", "torch_npu==2.13.0")

PACKAGES: Mapping[str, tuple[Package, ...]] = {
    "cpu": (_TORCH, _FBGEMM_CPU, _FBGEMM_STAND_IN, _TORCHREC),
    "cuda": (_TORCH, _FBGEMM_CUDA, _TORCHREC),
    "npu": (_TORCH, _TORCH_NPU, _FBGEMM_CPU, _FBGEMM_STAND_IN, _TORCHREC),
}
"""What is needed for a device, in the order in which it is imported."""


def packages(device: str) -> Iterator[Finding]:
    """The version of Python, and every package that is needed for this type of device."""
    version = ".".join(map(str, sys.version_info[:3]))
    if PYTHON[0] <= sys.version_info[:2] < PYTHON[1]:
        yield ok("Python", version)
    else:
        yield missing("Python", version, "make an environment with Python 3.10 to 3.13.")
    failures: set[str] = set()
    for package in PACKAGES[device]:
        failure = import_failure(package.module) if package.module else ""
        yield finding_of(package, failure, failure in failures)
        failures |= {failure} - {""}


def installed(name: str) -> str:
    """The version of a distribution; ``""`` if there is none of this name."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def finding_of(package: Package, failure: str, is_known: bool = False) -> Finding:
    """Whether a package is there in its version, and can be imported.

    Args:
        package: see ``Package``.
        failure: why it cannot be imported; ``""`` if it can.
        is_known: whether a package before it failed in the same way.
    """
    version, install = installed(package.name), f"pip install {package.install}"
    if failure and not version:
        return missing(package.name, "not installed", install)
    if failure and is_known:
        return missing(package.name, f"{version}, but it cannot be imported either", "the same")
    if failure:
        return missing(package.name, f"{version}, but it cannot be imported: {failure}", _after(failure, install))
    if not package.module and not version:
        return warning(package.name, "not installed, but TorchRec asks for it: pip check complains", install)
    if version and not fits(version, package.version):
        return missing(package.name, f"{version}, which does not fit: {package.version} does", install)
    return ok(package.name, version or "importable, of unknown version")


def fits(version: str, wanted: str) -> bool:
    """Whether a version is the wanted one; what follows a plus sign is a build, and counts only if it is wanted."""
    return version == wanted if "+" in wanted else version.partition("+")[0] == wanted


def import_failure(module: str) -> str:
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
        return f"it is a build for CUDA, which is not here: pip uninstall fbgemm-gpu, then pip install {_STAND_IN}"
    return f"{install} --force-reinstall"
