"""``make wheel``: the source distribution, and from it a wheel with a C++ library for each version of torch.

``make_wheel.py TOOLS ARCHITECTURE [SET...]`` writes both into ``dist``; what it downloads and compiles is kept in
``build/wheel``. It runs in an environment with recfx and setuptools; ``TOOLS`` is the folder of ``auditwheel``. Sets
are named by the minor version of torch, such as ``2.10``; default: all of ``recfx/versions/sets.py``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

from torch_headers import torch_root

from recfx.kernels.build.compiler import LIBRARIES, compile_library, library_name, torch_flags
from recfx.kernels.build.library import SOURCES
from recfx.versions.sets import SETS

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "wheel"
DIST = ROOT / "dist"
COMPATIBLE = Path(__file__).with_name("glibc_2_28.h")
GLIBC_MINOR = 28
COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}
INSIDE = Path("recfx", "kernels", LIBRARIES.parent.name, LIBRARIES.name)
_BUILD = (
    "import sys; from setuptools import build_meta; print(getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2]))"
)
_WHEN = (1980, 1, 1, 0, 0, 0)  # files in wheels carry no time, so that two builds are equal


def main(tools: str, architecture: str, *names: str) -> None:
    """Write ``dist/recfx-*.tar.gz`` and ``dist/recfx-*.whl``, and print their names."""
    platform = f"manylinux_2_{GLIBC_MINOR}_{architecture}"
    libraries = [_library(versions.torch, architecture) for versions in SETS if not names or versions.name in names]
    DIST.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        sdist = DIST / _build("sdist", ROOT, DIST)
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        (sources,) = scratch.iterdir()
        pure = scratch / _build("wheel", sources, scratch)
        wheel = DIST / pure.name.replace("-any.whl", f"-{platform}.whl")
        with zipfile.ZipFile(pure) as archive:
            archive.extractall(scratch / "content")
        (scratch / "content" / INSIDE).mkdir()
        for library in libraries:
            shutil.copy(library, scratch / "content" / INSIDE)
        checked = scratch / pure.name.replace("-any.whl", f"-linux_{architecture}.whl")
        pack(scratch / "content", f"linux_{architecture}", checked)
        _check(checked, platform, Path(tools).resolve())
        pack(scratch / "content", platform, wheel)
    print(sdist, wheel, sep="\n")


def _library(version: str, architecture: str) -> Path:
    """The library for a version of torch, compiled if it has not been, or from other sources."""
    included = sha256(COMPATIBLE.read_bytes()).hexdigest()[:8]
    library = KEPT / f"{architecture}-{included}" / library_name(version, SOURCES)
    if not library.exists():
        root = torch_root(version, architecture, KEPT)
        compiler = os.environ.get("CXX", COMPILERS[architecture]).split()
        print(f"compiling for torch {version} on {architecture}", flush=True)
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT) as scratch:
            compile_flags = [*torch_flags(root, cxx11_abi=True), "-include", str(COMPATIBLE)]
            linked = compile_library(compiler, SOURCES, Path(scratch), compile_flags, [f"-L{root / 'lib'}", "-Wl,-s"])
            linked.chmod(0o755)
            linked.rename(library)
    return library


def _build(kind: str, sources: Path, target: Path) -> str:
    """The name of what setuptools builds in ``target``."""
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, kind, target], cwd=sources, check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()[-1]


def pack(content: Path, platform: str, wheel: Path) -> None:
    """Pack a wheel that serves one platform and every Python."""
    (info,) = content.glob("*.dist-info")
    tags = (info / "WHEEL").read_text()
    tags = re.sub(r"-none-\S+", f"-none-{platform}", tags.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false"))
    (info / "WHEEL").write_text(tags)
    record = info / "RECORD"
    record.unlink()
    files = sorted(path for path in content.rglob("*") if path.is_file())
    lines = [f"{path.relative_to(content)},{_hash(path)},{path.stat().st_size}\n" for path in files]
    record.write_text("".join(lines) + f"{record.relative_to(content)},,\n")
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in [*files, record]:
            entry = zipfile.ZipInfo(str(path.relative_to(content)), _WHEN)
            entry.external_attr = (0o100755 if path.suffix == ".so" else 0o100644) << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)


def _hash(path: Path) -> str:
    return "sha256=" + urlsafe_b64encode(sha256(path.read_bytes()).digest()).rstrip(b"=").decode()


def _check(wheel: Path, platform: str, tools: Path) -> None:
    """Stop unless auditwheel grants the platform, torch's libraries apart, and none names a folder or an OpenMP.

    Args:
        wheel: tagged for Linux and nothing else, so that every platform in the name of its copy is a granted one.
        platform: the one that it will be tagged for.
        tools: the folder of auditwheel.
    """
    with tempfile.TemporaryDirectory() as folder:
        excluded = [f"--exclude={name}" for name in ("libtorch.so", "libtorch_cpu.so", "libc10.so")]
        # Not --plat=<platform>: on another architecture than its own, auditwheel knows no platform by name.
        command = [tools / "auditwheel", "repair", "--plat=auto", "--only-plat", *excluded, "-w", folder, wheel]
        path = f"{tools}:{os.environ['PATH']}"
        done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False)
        granted = [int(minor) for name in os.listdir(folder) for minor in re.findall(r"manylinux_2_(\d+)_", name)]
        if done.returncode or not granted or min(granted) > GLIBC_MINOR:
            raise SystemExit(f"auditwheel does not grant {platform}:\n{done.stdout}{done.stderr}")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".so"):
                    dynamic = subprocess.run(
                        ["readelf", "--dynamic", archive.extract(name, folder)],
                        check=True, capture_output=True, text=True,
                    ).stdout  # fmt: skip
                    if link := re.search(r"(RUNPATH|RPATH|NEEDED.*omp).*", dynamic):
                        raise SystemExit(f"{name}: {link[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
