"""Whether the packages that are installed fit each other and recfx: found in milliseconds, without importing them.

What ``import`` would take is looked at: the files that say of which version a package is, and not the records of pip,
of which there may be several for one package, or none.
"""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from recfx.errors import Diagnostic, VersionError
from recfx.versions.sets import DEFAULT, SETS, minor, nearest, set_of

ANY_VERSIONS = "RECFX_ANY_VERSIONS"
"""The environment variable that makes a warning of the error about versions that do not fit."""

_FILES = {  # of each of MODULES
    "torch": ["version.py"],
    "torchrec": ["version.py"],
    "fbgemm_gpu": ["docs/target.default.json.py", "docs/version.py"],
}
_SAYS = r"""(?:\b|__){}(?:__)?"?(?:: [\w\[\]]+)?\s*[:=]\s*['"]([^'"]+)['"]"""
_WITH_KERNELS = "fbgemm_gpu_sparse_async_cumsum.so"
"""FBGEMM's smallest library that has kernels for CUDA in every version, a megabyte or two."""


@dataclass(frozen=True)
class Installed:
    """A package that ``import`` finds.

    Args:
        folder: of its files.
        version: ``""`` if it does not say.
        variant: of FBGEMM: ``"cpu"``, ``"cuda"``, ``""`` if it does not say.
        cuda: of torch: the version of CUDA that it was built for, such as ``"12.6"``; ``""`` if there is none.
    """

    folder: Path
    version: str
    variant: str
    cuda: str


def look(module: str) -> Installed | None:
    """The package that ``import`` would take; ``None`` if there is none."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return None
    folder = Path(next(iter(spec.submodule_search_locations or [spec.origin or ""])))
    paths = (folder / name for name in _FILES[module])
    text = next((path.read_text() for path in paths if path.is_file()), "")
    matches = [re.search(_SAYS.format(name), text) for name in ("version", "variant", "cuda")]
    return Installed(folder, *(match[1] if match else "" for match in matches))


def has_cuda(torch: Installed | None) -> bool:
    """Whether a torch was built for CUDA."""
    return torch is not None and (torch.folder / "lib" / "libtorch_cuda.so").exists()


def device_of(torch: Installed | None) -> str:
    """The type of device that is worked on with this torch: ``"npu"``, ``"cuda"`` or ``"cpu"``."""
    return "npu" if importlib.util.find_spec("torch_npu") else "cuda" if has_cuda(torch) else "cpu"


def unfit() -> Diagnostic | None:
    """What is missing or does not fit, with the command that installs what does; ``None`` if all is well.

    A package that does not say its version fits, torch apart.
    """
    packages = {module: look(module) for module in _FILES}
    here = {module: package for module, package in packages.items() if package is not None}
    versions = {module: package.version for module, package in here.items()}
    device = device_of(packages["torch"])
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
    install = row.install(device, ["fbgemm_gpu"])
    if here["fbgemm_gpu"].variant == "cuda" and not has_cuda(packages["torch"]):
        message = "fbgemm_gpu is a build for CUDA, which cannot be loaded beside a torch without CUDA."
        remove = "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && "
        return Diagnostic("fbgemm_needs_cuda", "", message, remove + install)
    of_torch, of_fbgemm = here["torch"].cuda.partition(".")[0], _major_cuda(here["fbgemm_gpu"])
    if of_torch and of_fbgemm and of_torch != of_fbgemm:
        message = f"fbgemm_gpu was built for CUDA {of_fbgemm}, but torch for CUDA {of_torch}."
        index = f"https://download.pytorch.org/whl/cu{here['torch'].cuda.replace('.', '')}"
        advice = f"pip uninstall -y fbgemm-gpu && {install} --index-url {index}, or build it for that version of CUDA"
        return Diagnostic("fbgemm_for_other_cuda", "", message, advice)
    return None


def _major_cuda(fbgemm: Installed) -> str:
    """The major version of CUDA whose runtime FBGEMM is linked with; ``""`` if there is none."""
    library = fbgemm.folder / _WITH_KERNELS
    if fbgemm.variant != "cuda" or not library.is_file():
        return ""
    match = re.search(rb"libcudart\.so\.(\d+)", library.read_bytes())
    return match[1].decode() if match else ""


def refused() -> VersionError | None:
    """The error that ``import recfx`` raises, if any. Where the user has asked for that, it is a warning."""
    problem = unfit()
    if problem is None:
        return None
    if problem.code == "packages_missing" or os.environ.get(ANY_VERSIONS, "") in ("", "0"):
        return VersionError.of(problem)
    warnings.warn(str(problem), stacklevel=2)
    return None


def _in_words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version or 'of unknown version'}" for name, version in versions.items())
