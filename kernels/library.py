"""Builds and loads the C++ operators of namespace ``recfx``: one shared library with no Python in it.

The library is built from ``csrc/*.cpp`` with the system's C++ compiler the first time that it is needed, and kept in
``$RECFX_BUILD_DIR`` (default: ``recfx`` in the user's cache directory) under a name that carries a digest of whatever
it was made from. ``python -m recfx.kernels`` builds it ahead of time and prints its path, which is what a C++
server passes to ``dlopen``.

Where there is no compiler nothing breaks: ``load()`` answers ``False``, ``why_not()`` says why, a warning is logged
once, and callers use their torch references.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_logger = logging.getLogger("recfx")
_SOURCES = Path(__file__).resolve().parent / "csrc"
# -ffp-contract=off: no fused multiply-add, so that floats have the bits that the torch references give them.
_COMPILE_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-DAT_PER_OPERATOR_HEADERS", "-Wall"]
_LINK_FLAGS = ["-shared", "-fopenmp", "-ltorch", "-ltorch_cpu", "-lc10"]

_loaded: bool | None = None  # None: not tried yet
_reason = ""
_when_loaded: list[Callable[[], None]] = []


class LibraryBuildError(RuntimeError):
    """The library cannot be built: no compiler, or its message."""


def load() -> bool:
    """Load the library, building it if need be. The first answer is kept for the life of the process."""
    global _loaded, _reason
    if _loaded is None:
        try:
            torch.ops.load_library(str(build()))
            _loaded = True
        except (OSError, RuntimeError) as error:
            _reason = str(error)
            _loaded = False
            _logger.warning("C++ operators are not available, slower torch references are used instead: %s", _reason)
        if _loaded:
            for register in _when_loaded:
                register()
    return _loaded


def why_not() -> str:
    """Why ``load()`` answered ``False``; empty if it did not."""
    return _reason


def when_loaded(register: Callable[[], None]) -> Callable[[], None]:
    """Decorator: call the function once the operators exist. Families register their fake implementations with it."""
    _when_loaded.append(register)
    if _loaded:
        register()
    return register


def build() -> Path:
    """Path of an up-to-date library, compiled now if there is none yet.

    Raises:
        LibraryBuildError: there is no compiler, or it failed; the message holds what it printed.
    """
    library = build_directory() / f"librecfx-{_digest()}.so"
    if library.exists():
        return library
    compiler = _compiler()
    library.parent.mkdir(parents=True, exist_ok=True)
    # Several processes may get here at once: one compiles, the others wait for it.
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _logger.warning("compiling the C++ operators into %s, this takes about a minute", library)
            _compile(compiler, library)
    return library


def build_directory() -> Path:
    """Where built libraries are kept."""
    if named := os.environ.get("RECFX_BUILD_DIR"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "recfx"


def _compiler() -> list[str]:
    if named := os.environ.get("CXX"):
        return named.split()
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return [found]
    raise LibraryBuildError("no C++ compiler found: install g++, or name one in the environment variable CXX")


def _flags() -> list[str]:
    # Not torch.utils.cpp_extension: importing it needs setuptools.
    headers = Path(torch.__file__).parent / "include"
    abi = int(torch.compiled_with_cxx11_abi())
    includes = [f"-I{headers}", f"-I{headers / 'torch' / 'csrc' / 'api' / 'include'}"]
    return [*_COMPILE_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *includes]


def _digest() -> str:
    digest = hashlib.sha256()
    for part in (torch.__version__, os.environ.get("CXX", ""), *_flags(), *_LINK_FLAGS):
        digest.update(part.encode() + b"\0")
    for source in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _compile(compiler: list[str], library: Path) -> None:
    sources = sorted(_SOURCES.glob("*.cpp"))
    torch_libraries = Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        commands = [
            [*compiler, *_flags(), "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = Path(scratch) / library.name
        paths = [f"-L{torch_libraries}", f"-Wl,-rpath,{torch_libraries}"]
        _run([*compiler, *map(str, objects), "-o", str(linked), *paths, *_LINK_FLAGS])
        os.replace(linked, library)  # atomic: nobody ever sees half a library


def _run(command: list[str]) -> None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise LibraryBuildError(f"the C++ compiler {command[0]} cannot be run: {error}") from error
    if finished.returncode != 0:
        raise LibraryBuildError(f"the C++ compiler failed: {' '.join(command)}\n{finished.stderr}")


def main() -> int:
    """Build, then print the path of the library; 1 and the compiler's message if that fails."""
    try:
        print(build())
    except (OSError, LibraryBuildError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
