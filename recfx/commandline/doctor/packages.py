"""The packages and the CANN that recfx needs: which versions are here, whether they fit, and the command that mends it.

Nothing is imported to look at a version. The files that ``import`` would take say which one they are: records of pip
may be several for one package, or none. That takes milliseconds, and works where torch cannot be imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from recfx.commandline.doctor.report import Finding, Report
from recfx.errors import Diagnostic, VersionError
from recfx.versions.sets import DEFAULT, MODULES, PYTHONS, SETS, is_between, minor, nearest, set_of

ANY_VERSIONS = "RECFX_ANY_VERSIONS"
"""The environment variable that makes a warning of the error about versions that do not fit."""

DEVICES = ("cpu", "cuda", "npu")
CANN_FOLDERS = ("/usr/local/Ascend", "~/Ascend")
"""Where CANN's installer puts it for root, and for a user."""

_FILES = {
    "torch": ["version.py"],
    "torch_npu": ["version.py"],
    "torchrec": ["version.py"],
    "fbgemm_gpu": ["docs/target.default.json.py", "docs/version.py"],
}
_SAYS = r"""(?:\b|__){}(?:__)?"?(?:: [\w\[\]]+)?\s*[:=]\s*['"]([^'"]+)['"]"""
_OLDEST_CANN = (8, 5)  # the first whose compiler takes what triton-ascend 3.2 lowers to
_VERSION_OF_CANN = re.compile(r"^\s*\w*version\w*\s*=\s*\[?\"?([0-9][\w.]*)", re.IGNORECASE | re.MULTILINE)
_ERROR = re.compile(r"[\w.]+(Error|Exception|Exit): ")


class Installed(NamedTuple):
    """A package that ``import`` finds; what it does not say is ``""``."""

    folder: Path
    version: str
    variant: str  # of FBGEMM: cpu or cuda


def look(module: str) -> Installed | None:
    """The package that ``import`` would take; ``None`` if there is none."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return None
    folder = Path(next(iter(spec.submodule_search_locations or [spec.origin or ""])))
    paths = (folder / name for name in _FILES[module])
    text = next((path.read_text() for path in paths if path.is_file()), "")
    matches = [re.search(_SAYS.format(name), text) for name in ("version", "variant")]
    return Installed(folder, *(match[1] if match else "" for match in matches))


def has_cuda(torch: Installed | None) -> bool:
    """Whether a torch was built for CUDA."""
    return torch is not None and (torch.folder / "lib" / "libtorch_cuda.so").exists()


def device_of(torch: Installed | None) -> str:
    """The type of device that is worked on with this torch: ``"npu"``, ``"cuda"`` or ``"cpu"``."""
    return "npu" if importlib.util.find_spec("torch_npu") else "cuda" if has_cuda(torch) else "cpu"


def unfit(device: str = "") -> Diagnostic | None:
    """What is missing or does not fit, with the command that installs what does; ``None`` if all is well.

    A package that does not say its version fits, torch apart. ``device``: default: the one that torch is for.
    """
    packages = {module: look(module) for module in MODULES}
    here = {module: package for module, package in packages.items() if package is not None}
    versions = {module: package.version for module, package in here.items()}
    device = device or device_of(packages["torch"])
    row = nearest(versions.get("torch", DEFAULT.torch))
    to_install = {"torch": row.torch, "torchrec": row.torchrec, "fbgemm_gpu": row.fbgemm}
    if set_of(versions.get("torch", "")) is not None:  # any build of this minor version of torch stays
        to_install = {
            name: version
            for name, version in to_install.items()
            if name not in here or (versions[name] and minor(versions[name]) != minor(version))
        }
    install = row.install(device, to_install)
    if len(here) < len(packages):
        names = ", ".join(module for module in packages if module not in here)
        return Diagnostic("packages_missing", "", f"recfx needs packages that cannot be found here: {names}.", install)
    if to_install:
        message = f"these versions do not fit each other, or recfx: {_in_words(versions)}. The nearest that do: "
        message += f"{_in_words(to_install)}; recfx runs on torch {', '.join(one_set.name for one_set in SETS)}."
        advice = f"{install} (or set {ANY_VERSIONS}=1, and recfx tries to run on what is here)"
        return Diagnostic("versions_unfit", "", message, advice)
    if here["fbgemm_gpu"].variant == "cuda" and not has_cuda(packages["torch"]):
        message = "fbgemm_gpu is a build for CUDA, which cannot be loaded beside a torch without CUDA."
        remove = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && "
        return Diagnostic("fbgemm_needs_cuda", "", message, remove + row.install(device, ["fbgemm_gpu"]))
    return None


def refused() -> VersionError | None:
    """The error that ``import recfx`` raises, if any. It is a warning for a torch between two sets, and on request."""
    problem, torch = unfit(), look("torch")
    if problem is None:
        return None
    warns = os.environ.get(ANY_VERSIONS, "") not in ("", "0") or (torch is not None and is_between(torch.version))
    if problem.code == "packages_missing" or not warns:
        return VersionError.of(problem)
    warnings.warn(str(problem), stacklevel=2)
    return None


def check_at_start() -> None:
    """Raise what ``import recfx`` raises, before it imports other packages.

    ``python -m recfx doctor`` instead prints what is missing, and ends with status 1. That is the first day of many:
    torch is installed with torch_npu, CANN's environment script was not sourced, and ``import torch`` fails.
    """
    command = re.search(r"(?:-\w*m ?|[/\\])recfx(?: (.*))?$", " ".join(sys.orig_argv))  # of the command line of recfx
    arguments, error = (command[1] or "").split() if command else [], refused()
    if arguments[:1] == ["doctor"] and (error or not all(map(_is_importable, MODULES))):
        import argparse  # here, because every program that imports recfx would wait for it

        parser = argparse.ArgumentParser(add_help=False)
        parser.add_argument("--device", default=device_of(look("torch")))
        parser.add_argument("--json", action="store_true")
        given, _ = parser.parse_known_args(arguments[1:])
        kind = given.device.partition(":")[0]
        report = Report(given.device, stopped="Nothing was run: recfx cannot be imported here.")
        report.findings += packages(kind if kind in DEVICES else "cpu")
        report.findings += cann() if kind == "npu" else ()
        print(report.to_json() if given.json else report, flush=True)
        os._exit(1)  # libraries that were loaded in part may crash in an orderly end
    if error is not None and command is not None:
        sys.exit(f"recfx: {error}")
    if error is not None:
        raise error


def _is_importable(module: str) -> bool:
    environment = dict(os.environ)
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError):  # what does not fit fails in many ways
        os.environ.clear()
        os.environ.update(environment)  # while it loads extensions, torch tells its children not to
        return False
    return True


def _in_words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version or 'of unknown version'}" for name, version in versions.items())


def packages(device: str) -> Iterator[Finding]:
    """The version of Python, and every package that is needed for ``"cpu"``, ``"cuda"`` or ``"npu"``."""
    python = ".".join(map(str, sys.version_info[:3]))
    if minor(python) in PYTHONS:
        yield Finding("Python", python)
    else:
        yield Finding("Python", python, f"make an environment with Python {PYTHONS[0]} to {PYTHONS[-1]}.")
    problem, torch = unfit(device), look("torch")
    version = torch.version if torch else DEFAULT.torch
    row, failure = nearest(version), ""
    if set_of(version):
        row = replace(row, torch=version)  # a vendor's build stays
    for module in ("torch", *(["torch_npu"] if device == "npu" else []), "torchrec", "fbgemm_gpu"):
        package = look(module)
        install = row.install(device, MODULES if module == "torch_npu" else [module])
        fitting = row.torch_npu if module == "torch_npu" else ""
        if package is None:
            yield Finding(module, "not installed", problem.what_to_do if problem else install)
        elif not failure and (failure := _import_failure(module)):  # those that import it would fail alike
            text = f"{package.version}, but it cannot be imported: {failure}"
            yield Finding(module, text, _after(failure, install))
        elif fitting and package.version and minor(package.version) != minor(fitting):
            yield Finding(module, f"{package.version}, which does not fit: {fitting} does", install)
        elif device == "cuda" and package.variant == "cpu":
            yield Finding(module, f"{package.version}, which is a build for the CPU", install)
        else:
            yield Finding(module, package.version or "of unknown version")
    if problem and problem.code != "packages_missing":
        yield Finding("versions", problem.message, problem.what_to_do)


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
    """CANN and its compiler, for the ``environment`` of a process; else CANN is looked for in ``roots``."""
    home = environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")
    scripts = [script for root in roots for script in sorted(Path(os.path.expanduser(root)).glob("*/set_env.sh"))]
    version = _version_of_cann(Path(home)) if home else ""
    if not home and scripts:
        yield Finding("CANN", "installed, but its environment is not set", f"source {scripts[0]}")
    elif not home or (version and tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST_CANN):
        yield Finding("CANN", version or "not found", "install CANN 8.5 or later, and source its set_env.sh")
    else:
        yield Finding("CANN", f"{version or 'of unknown version'} in {home}")
    path = shutil.which("bishengir-compile", path=environment.get("PATH"))
    if path := path or environment.get("TRITON_NPU_COMPILER_PATH"):
        yield Finding("Ascend compiler", path)
    else:
        yield Finding("Ascend compiler", "no bishengir-compile on PATH", "source CANN's set_env.sh, which adds it")


def _version_of_cann(home: Path) -> str:
    """The version that an installation writes down; ``""`` if it cannot be found."""
    for pattern in ("version.cfg", "*_install.info", "*/ascend_*_install.info", "version.info", "*/version.info"):
        for file in filter(Path.is_file, sorted(home.glob(pattern))):
            if os.access(file, os.R_OK) and (match := _VERSION_OF_CANN.search(file.read_text(errors="replace"))):
                return match[1]
    return ""
