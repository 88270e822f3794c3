"""The headers of a torch, and the libraries that are linked with: what its wheel has of these, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_LIBRARIES = {"torch/lib/libtorch.so", "torch/lib/libtorch_cpu.so", "torch/lib/libc10.so"}


def torch_root(version: str, architecture: str, cache: Path) -> Path:
    """The folder ``torch`` of a version, with ``include`` and ``lib``, downloaded from the package index if need be.

    Args:
        version: of torch, such as ``2.13.0``.
        architecture: ``x86_64`` or ``aarch64``.
        cache: the folder in which it is kept.
    """
    kept = cache / f"torch-{version}-{architecture}"
    if not kept.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            _extract(_download(version, architecture, Path(scratch)), Path(scratch) / "kept")
            (Path(scratch) / "kept").rename(kept)
    return kept / "torch"


def _download(version: str, architecture: str, folder: Path) -> Path:
    platforms = [f"--platform=manylinux_2_{glibc}_{architecture}" for glibc in (28, 17)]
    what = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", *platforms, f"torch=={version}"]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--dest", folder, *what], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _extract(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("torch/include/") or name in _LIBRARIES]
        archive.extractall(folder, names)
