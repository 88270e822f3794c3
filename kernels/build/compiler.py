"""Compiles C++ sources into one shared library, against the headers of a torch that may be another than this one.

A wheel carries such libraries, one for each minor version of torch, whose C++ interface changes with it, in
``libraries``, beside this module. Whoever can write there can write to recfx's own modules as well, so it does not
matter who owns the files. A digest of the sources in the name keeps a library of other sources from being taken.
"""

import errno
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# -ffp-contract=off: no fused multiply-add, so that results equal those of the torch references bit for bit.
# -fno-math-errno: vectors of square roots.
COMPILE_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-DAT_PER_OPERATOR_HEADERS",
    "-Wall",
]
# Without -fopenmp: its functions are those of whatever OpenMP torch was linked with, which has another name in some
# builds of torch. A process with two OpenMP libraries would have two pools of threads.
LINK_FLAGS = ["-shared", "-ltorch", "-ltorch_cpu", "-lc10"]


class LibraryBuildError(RuntimeError):
    """The library cannot be built: there is no compiler, or it failed."""


def find_compiler() -> list[str]:
    """The command ``$CXX``, or else the first C++ compiler on the path.

    Raises:
        LibraryBuildError: there is none.
    """
    if named := os.environ.get("CXX", "").split():
        return named
    for name in ("g++", "c++", "clang++"):
        if compiler := shutil.which(name):
            return [compiler]
    raise LibraryBuildError("no C++ compiler found: install g++, or set the environment variable CXX to one")


def torch_flags(torch_root: Path, cxx11_abi: bool) -> list[str]:
    """The flags with which the headers of a torch are found, and used as that torch was built."""
    # Not torch.utils.cpp_extension: importing it needs setuptools.
    headers = torch_root / "include"
    includes = [f"-I{headers}", f"-I{headers / 'torch' / 'csrc' / 'api' / 'include'}"]
    return [f"-D_GLIBCXX_USE_CXX11_ABI={int(cxx11_abi)}", *includes]


def digest_of(sources: Path, *parts: str) -> str:
    """16 hexadecimal digits that change with the content of the sources, the flags, and what else is named."""
    digest = hashlib.sha256()
    for part in (*parts, *COMPILE_FLAGS, *LINK_FLAGS):
        digest.update(part.encode() + b"\0")
    for source in sorted([*sources.rglob("*.cpp"), *sources.rglob("*.h")]):
        digest.update(str(source.relative_to(sources)).encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def compile_library(
    compiler: Sequence[str], sources: Path, scratch: Path, compile_flags: Sequence[str], link_flags: Sequence[str]
) -> Path:
    """Compile all of ``sources`` with ``COMPILE_FLAGS``, and link them with ``LINK_FLAGS``.

    The files of a folder are one translation unit: reading torch's headers is half of what each file would take. The
    library is a file in ``scratch``, an empty folder.

    Raises:
        LibraryBuildError: the compiler failed; the message contains its output.
        OSError: there is no disk space.
    """
    units = []
    for folder in sorted({file.parent for file in sources.rglob("*.cpp")}, reverse=True):  # "step" takes longest
        units.append(scratch / f"{folder.name}.cpp")
        files = (file.relative_to(sources) for file in sorted(folder.glob("*.cpp")))
        units[-1].write_text("".join(f'#include "{file}"\n' for file in files))
    objects = [unit.with_suffix(".o") for unit in units]
    flags = [*COMPILE_FLAGS, *compile_flags, f"-I{sources}"]
    commands = [
        [*compiler, *flags, "-c", str(unit), "-o", str(target)] for unit, target in zip(units, objects, strict=True)
    ]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    linked = scratch / "linked.so"
    _run([*compiler, *map(str, objects), "-o", str(linked), *link_flags, *LINK_FLAGS])
    return linked


def _run(command: list[str]) -> None:
    try:
        english = {**os.environ, "LC_ALL": "C"}  # what it says is looked through below
        finished = subprocess.run(command, env=english, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise LibraryBuildError(f"the C++ compiler {command[0]} cannot be run: {error}") from error
    if os.strerror(errno.ENOSPC) in finished.stderr:
        raise OSError(errno.ENOSPC, f"there is no disk space to compile the C++ operators: {finished.stderr.strip()}")
    if finished.returncode != 0:
        how = f"was killed by signal {-finished.returncode}" if finished.returncode < 0 else "failed"
        first = next((line for line in finished.stderr.splitlines() if "error" in line), "it said nothing of an error")
        raise LibraryBuildError(f"the C++ compiler {how}: {first}\n{' '.join(command)}\n{finished.stderr}")


LIBRARIES = Path(__file__).resolve().parent / "libraries"


def library_name(torch_version: str, sources: Path) -> str:
    """The name of the file that serves a version of torch, such as ``2.13.0+cpu``."""
    minor = re.match(r"\d+\.\d+", torch_version)
    return f"librecfx-torch{minor[0] if minor else torch_version}-{digest_of(sources)}.so"


def packaged_library(torch_version: str, cxx11_abi: bool, sources: Path) -> Path | None:
    """The library for this torch that came with recfx; None if there is none.

    Args:
        torch_version: of the torch that is to load it.
        cxx11_abi: whether that torch was built with the C++11 ABI of libstdc++, as all that packages carry were.
        sources: the folder of the sources.
    """
    path = LIBRARIES / library_name(torch_version, sources)
    return path if cxx11_abi and path.is_file() else None
