"""The Python packages that recfx needs for a kind of device: which versions are there, and whether they can be used."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace

from recfx.doctor.finding import Finding, missing, ok
from recfx.versions.sets import DEFAULT, PYTHONS, minor, nearest, set_of

DEVICES = ("cpu", "cuda", "npu")

_ERROR = re.compile(r"[\w.]+(Error|Exception|Exit): ")


@dataclass(frozen=True)
class Package:
    """A package whose version has to fit those of others.

    Args:
        name: of the distribution.
        module: what is imported.
        version: the one that has been tested; others of the same minor version fit.
        install: the command that installs it.
    """

    name: str
    module: str
    version: str
    install: str


def needed(device: str, torch: str) -> tuple[Package, ...]:
    """What is needed for a type of device, in the order in which it is imported.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        torch: the version that is there, which may be a vendor's build, and stays if it fits; ``""`` if there is none.
    """
    fitting = set_of(torch)
    versions = replace(fitting, torch=torch) if fitting else nearest(torch or DEFAULT.torch)
    install = versions.install(device)
    fbgemm, torchrec = (versions.install(device, [name]) if fitting else install for name in ("fbgemm_gpu", "torchrec"))
    adapter = (Package("torch_npu", "torch_npu", versions.torch_npu, install),) if device == "npu" else ()
    return (
        Package("torch", "torch", versions.torch, install),
        *adapter,
        Package("fbgemm-gpu" if device == "cuda" else "fbgemm-gpu-cpu", "fbgemm_gpu", versions.fbgemm, fbgemm),
        Package("torchrec", "torchrec", versions.torchrec, torchrec),
    )


def packages(device: str) -> Iterator[Finding]:
    """The version of Python, and every package that is needed for this type of device."""
    version = ".".join(map(str, sys.version_info[:3]))
    if minor(version) in PYTHONS:
        yield ok("Python", version)
    else:
        yield missing("Python", version, f"make an environment with Python {PYTHONS[0]} to {PYTHONS[-1]}.")
    failures: set[str] = set()
    for package in needed(device, installed("torch")):
        failure = import_failure(package.module)
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
    version, install = installed(package.name), package.install
    if failure and not version:
        return missing(package.name, "not installed", install)
    if failure and is_known:
        return missing(package.name, f"{version}, but it cannot be imported either", "the same")
    if failure:
        return missing(package.name, f"{version}, but it cannot be imported: {failure}", _after(failure, install))
    if version and minor(version) != minor(package.version):
        return missing(package.name, f"{version}, which does not fit: {package.version} does", install)
    return ok(package.name, version or "importable, of unknown version")


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
        return f"it is a build for CUDA, which is not here: pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {install}"
    # With dependencies, this would replace the torch that others depend on.
    again = "--force-reinstall" if " torch==" in install else "--force-reinstall --no-deps"
    return install.replace("--no-deps ", "").replace("pip install", f"pip install {again}")
