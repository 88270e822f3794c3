"""Builds and loads the C++ operators of namespace ``recfx``: one shared library with no Python in it.

The library is built from ``csrc/*.cpp`` with the system's C++ compiler the first time that it is needed, and kept in
``$RECFX_BUILD_DIR`` (default: ``recfx`` in the user's cache directory) under a name that carries a digest of whatever
it was made from. ``python -m recfx.kernels`` builds it ahead of time and prints its path, which is what a C++
server passes to ``dlopen``.

A library is code that runs, so it is only taken from a directory, and as a file, that nobody else may write to (see
``private_files.py``); and it ends with a seal, a digest of its content, so that one that is damaged or empty is built
anew. Where it cannot be kept in that directory, it is built in a temporary one that goes when the process ends.

Where there is no compiler nothing breaks: ``load()`` answers ``False``, ``why_not()`` says why, a warning is logged
once, and callers use their torch references.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from .private_files import UnsafeError, make_private_directory, refuse_unsafe, write_durably

_logger = logging.getLogger("recfx")
_SOURCES = Path(__file__).resolve().parent / "csrc"
# -ffp-contract=off: no fused multiply-add, so that floats have the bits that the torch references give them.
_COMPILE_FLAGS = ["-std=c++20", "-O3", "-fPIC", "-fopenmp", "-ffp-contract=off", "-DAT_PER_OPERATOR_HEADERS", "-Wall"]
_LINK_FLAGS = ["-shared", "-fopenmp", "-ltorch", "-ltorch_cpu", "-lc10"]

# At the end of a library: loaders do not look there.
_SEAL = b"recfx-sealed:"

_loaded: bool | None = None  # None: not tried yet
_reason = ""
_when_loaded: list[Callable[[], None]] = []
_loading = threading.RLock()


def _in_child() -> None:
    global _loading
    _loading = threading.RLock()  # the thread that held it is not there to let it go


os.register_at_fork(after_in_child=_in_child)


class LibraryBuildError(RuntimeError):
    """The library cannot be built: no compiler, or its message."""


def load() -> bool:
    """Load the library, building it if need be. The first answer is kept for the life of the process."""
    if _loaded is None:
        with _loading:
            _load_once()
    return bool(_loaded)


def _load_once() -> None:
    global _loaded, _reason
    if _loaded is not None:
        return
    try:
        _open_library()
    except (OSError, RuntimeError) as error:
        _reason = str(error)
        _logger.warning("C++ operators are not available, slower torch references are used instead: %s", _reason)
        _loaded = False
        return
    while _when_loaded:
        _when_loaded[0]()
        _when_loaded.pop(0)
    _loaded = True


def _open_library() -> None:
    try:
        path = build()
    except OSError as error:  # LibraryBuildError is none: what does not compile here does not compile elsewhere
        path = _build_for_this_process(error)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        _logger.warning("%s cannot be loaded and is built anew: %s", path, error)
        torch.ops.load_library(str(build(anew=True)))


def why_not() -> str:
    """Why ``load()`` answered ``False``; empty if it did not."""
    return _reason


def when_loaded(register: Callable[[], None]) -> Callable[[], None]:
    """Decorator: call the function once the operators exist. Families register their fake implementations with it."""
    if _loaded:
        register()
    else:
        _when_loaded.append(register)
    return register


def build(anew: bool = False) -> Path:
    """Path of an up-to-date library, compiled now if there is none yet.

    Args:
        anew: compile it in any case.

    Raises:
        LibraryBuildError: there is no compiler, or it failed; the message holds what it printed.
        OSError: the directory cannot be written, or (``UnsafeError``) others may write to it.
    """
    return _build_in(build_directory(), anew)


def _build_in(directory: Path, anew: bool = False) -> Path:
    library = directory / f"librecfx-{_digest()}.so"
    # Without a name it is in the user's own cache, where nobody else has business.
    make_private_directory(directory, tighten="RECFX_BUILD_DIR" not in os.environ)
    if not anew and _problem(library) is None:
        return library
    compiler = _compiler()
    # Several processes may get here at once: one compiles, the others wait for it.
    with _locked(library.with_suffix(".lock")):
        problem = "" if anew else _problem(library)
        if problem:
            _logger.warning("%s, and is built anew", problem)
        if problem is not None:
            _logger.warning("compiling the C++ operators into %s, this takes about a minute", library)
            _compile(compiler, library)
    return library


def _build_for_this_process(error: OSError) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="recfx-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    _logger.warning(
        "the C++ operators cannot be kept: %s. They are compiled for this process alone, in %s. What to do: name a "
        "directory of your own in the environment variable RECFX_BUILD_DIR.",
        error,
        directory,
    )
    return _build_in(directory)


def _problem(library: Path) -> str | None:
    """Why it cannot be taken: damaged, made for something else, or not this user's; empty if it is not there."""
    try:
        refuse_unsafe(library)
        content = library.read_bytes()
    except FileNotFoundError:
        return ""
    except UnsafeError as error:
        return str(error)
    return None if content.endswith(_seal(content[: -len(_seal(b""))])) else f"{library} is damaged"


def _seal(content: bytes) -> bytes:
    return _SEAL + hashlib.sha256(_digest().encode() + content).hexdigest().encode()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems: everybody compiles, and the last one is kept
            _logger.warning("%s cannot be locked: %s", path, error)
        try:
            yield
        finally:  # not only by closing it: a child that was forked meanwhile has it open as well
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


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
    for part in (torch.__version__, str(torch.version.git_version), os.environ.get("CXX", ""), *_flags(), *_LINK_FLAGS):
        digest.update(part.encode() + b"\0")
    for source in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _compile(compiler: list[str], library: Path) -> None:
    sources = sorted(_SOURCES.glob("*.cpp"))
    torch_libraries = Path(torch.__file__).parent / "lib"
    prefix = f"build-{library.stem}-"
    for left in library.parent.glob(f"{prefix}*"):  # of a process that was killed: who builds it now holds the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=library.parent) as scratch:
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
        content = linked.read_bytes()
        write_durably(library, content + _seal(content))


def _run(command: list[str]) -> None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise LibraryBuildError(f"the C++ compiler {command[0]} cannot be run: {error}") from error
    if os.strerror(errno.ENOSPC) in finished.stderr:
        raise OSError(errno.ENOSPC, f"there is no room to compile the C++ operators: {finished.stderr.strip()}")
    if finished.returncode != 0:
        how = f"was killed by signal {-finished.returncode}" if finished.returncode < 0 else "failed"
        raise LibraryBuildError(f"the C++ compiler {how}: {' '.join(command)}\n{finished.stderr}")


def main() -> int:
    """Build, then print the path of the library; 1 and the compiler's message if that fails."""
    try:
        print(build())
    except (OSError, LibraryBuildError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
