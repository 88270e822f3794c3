"""Builds and loads the C++ operators of namespace ``recfx``: one shared library that does not depend on Python.

The library is built from ``csrc`` with the system's C++ compiler the first time it is needed. It is kept in
``$RECFX_BUILD_DIR`` (default: ``recfx`` in the user's cache directory), under a name that contains a digest of
everything that it is made from. ``python -m recfx.kernels`` builds it in advance and prints its path, which a C++
server can pass to ``dlopen``.

Loading a library runs its code, so recfx only loads files that nobody else can write to, from directories that nobody
else can write to (see ``private_files.py``). Each library ends with a seal, a digest of its content, so that a damaged
or empty one is rebuilt. If the library cannot be kept in that directory, it is built in a temporary one that is removed
when the process ends.

If there is no compiler, nothing breaks: ``load()`` returns ``False``, ``why_not()`` says why, and a warning is logged
once. ``operators()`` then has the same operators with the same signatures, which are read from the sources, and those
with a reference in torch (``reference``) run by it. With the library, the references run on devices other than the CPU.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from recfx.kernels.build.private_files import UnsafeError, make_private_directory, new_file, refuse_unsafe

_logger = logging.getLogger("recfx")
SOURCES = Path(__file__).resolve().parents[1] / "csrc"
# -ffp-contract=off: no fused multiply-add, so that results equal those of the torch references bit for bit.
# -fno-math-errno: vectors of square roots.
_COMPILE_FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-DAT_PER_OPERATOR_HEADERS",
    "-Wall",
]
_LINK_FLAGS = ["-shared", "-fopenmp", "-ltorch", "-ltorch_cpu", "-lc10"]

# Written at the end of a library, where loaders do not look.
_SEAL = b"recfx-sealed:"

_loaded: bool | None = None  # None: not tried so far
_reason = ""
_path: Path | None = None
_when_defined: list[Callable[[], object]] = []
_fragment: torch.library.Library | None = None  # keeps what was registered from Python alive
_DEFINITION = re.compile(r'library\.def\(\s*((?:"[^"]*"\s*)+)')
REFERENCES: dict[str, Callable[..., Any]] = {}
"""The functions in torch by which operators run where they have no kernel, by the operator's name."""
_loading = threading.RLock()


def _in_child() -> None:
    global _loading
    _loading = threading.RLock()  # the thread that held it does not exist here and cannot release it


os.register_at_fork(after_in_child=_in_child)


class LibraryBuildError(RuntimeError):
    """The library cannot be built: there is no compiler, or it failed."""


def load() -> bool:
    """Load the library, building it if necessary. The first answer is kept for the life of the process."""
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
        _logger.warning("C++ operators are not available; using the slower torch references instead: %s", _reason)
        for schema in schemas():
            if not hasattr(torch.ops.recfx, schema.partition("(")[0]):
                _library().define(schema)
        _register()
        _loaded = False
        return
    _register()
    _loaded = True


def _register() -> None:
    while _when_defined:
        _when_defined[0]()
        _when_defined.pop(0)


def schemas() -> list[str]:
    """The signatures of all operators, as the C++ sources declare them."""
    return [
        "".join(re.findall(r'"([^"]*)"', definition))
        for source in sorted(SOURCES.rglob("*.cpp"))
        for definition in _DEFINITION.findall(source.read_text())
    ]


def _fake_what_returns_nothing() -> None:
    for schema in schemas():
        if schema.endswith("-> ()"):
            torch.library.register_fake(f"recfx::{schema.partition('(')[0]}", lambda *arguments: None)


_when_defined.append(_fake_what_returns_nothing)


def operators() -> Any:
    """``torch.ops.recfx``, once its operators exist: in C++, or without kernels for the CPU if there is no library."""
    if _loaded is None:
        load()
    return torch.ops.recfx


def loaded_path() -> Path | None:
    """The file that was loaded; None if none was. It is temporary if it could not be kept, see above."""
    return _path


def _open_library() -> None:
    global _path
    try:
        path = build()
    except OSError as error:  # not LibraryBuildError: code that does not compile here does not compile elsewhere
        path = _build_for_this_process(error)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        _logger.warning("%s cannot be loaded and is rebuilt: %s", path, error)
        path = build(anew=True)
        torch.ops.load_library(str(path))
    _path = _path or path  # operators are those of the first library that has them


def why_not() -> str:
    """Why ``load()`` answered ``False``; empty if it did not."""
    return _reason


_F = TypeVar("_F", bound=Callable[..., Any])


def reference(name: str) -> Callable[[_F], _F]:
    """Decorator: the operator of this name runs by the function on devices for which it has no other kernel."""

    def register(function: _F) -> _F:
        REFERENCES[name] = function
        _once_defined(partial(_implement, name, function, "CompositeExplicitAutograd"))
        return function

    return register


def kernel(name: str, *dispatch_keys: str) -> Callable[[_F], _F]:
    """Decorator: the operator of this name runs by the function on the devices of these dispatch keys of torch."""

    def register(function: _F) -> _F:
        for key in dispatch_keys:
            _once_defined(partial(_implement, name, function, key))
        return function

    return register


def fake(*names: str) -> Callable[[_F], _F]:
    """Decorator: the function returns what these operators return, without numbers. Only for those that return some."""

    def register(function: _F) -> _F:
        for name in names:
            _once_defined(partial(torch.library.register_fake, f"recfx::{name}", function))
        return function

    return register


def _implement(name: str, function: Callable[..., Any], dispatch_key: str) -> None:
    _library().impl(name, function, dispatch_key)


def _once_defined(register: Callable[[], object]) -> None:
    if _loaded is None:
        _when_defined.append(register)
    else:
        register()


def _library() -> torch.library.Library:
    global _fragment
    if _fragment is None:
        _fragment = torch.library.Library("recfx", "FRAGMENT")
    return _fragment


def build(anew: bool = False) -> Path:
    """The path of an up-to-date library, which is compiled now if there is none yet.

    Args:
        anew: compile it even if there is one.

    Raises:
        LibraryBuildError: there is no compiler, or it failed; the message contains its output.
        OSError: the directory is not writable, or (``UnsafeError``) others may write to it.
    """
    return _build_in(build_directory(), anew)


def _build_in(directory: Path, anew: bool = False) -> Path:
    library = directory / f"librecfx-{_digest()}.so"
    # The default is in the user's own cache, where nobody else needs to write.
    make_private_directory(directory, tighten="RECFX_BUILD_DIR" not in os.environ)
    if not anew and _problem(library) is None:
        return library
    compiler = _compiler()
    # Several processes may get here at once: one compiles, the others wait for it.
    with _locked(library.with_suffix(".lock")):
        problem = "" if anew else _problem(library)
        if problem:
            _logger.warning("%s and is rebuilt", problem)
        if problem is not None:
            _logger.warning("compiling the C++ operators into %s; this takes about a minute", library)
            _compile(compiler, library)
    return library


def _build_for_this_process(error: OSError) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="recfx-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    _logger.warning(
        "the C++ operators cannot be kept: %s. They are compiled in %s, for this process only. What to do: set "
        "the environment variable RECFX_BUILD_DIR to a directory of your own.",
        error,
        directory,
    )
    return _build_in(directory)


def _problem(library: Path) -> str | None:
    """Why the library cannot be used: it is damaged, or not safe from other users. Empty if it does not exist."""
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
        except OSError as error:  # on some network file systems: every process compiles, and the last result is kept
            _logger.warning("%s cannot be locked: %s", path, error)
        try:
            yield
        finally:  # closing is not enough: a child that was forked meanwhile has the file open as well
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)


def build_directory() -> Path:
    """The directory in which built libraries are kept."""
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
    raise LibraryBuildError("no C++ compiler found: install g++, or set the environment variable CXX to one")


def _flags() -> list[str]:
    # Not torch.utils.cpp_extension: importing it needs setuptools.
    headers = Path(torch.__file__).parent / "include"
    abi = int(torch.compiled_with_cxx11_abi())
    includes = [f"-I{SOURCES}", f"-I{headers}", f"-I{headers / 'torch' / 'csrc' / 'api' / 'include'}"]
    return [*_COMPILE_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *includes]


def _digest() -> str:
    digest = hashlib.sha256()
    flags = [flag for flag in _flags() if flag != f"-I{SOURCES}"]
    for part in (torch.__version__, str(torch.version.git_version), os.environ.get("CXX", ""), *flags, *_LINK_FLAGS):
        digest.update(part.encode() + b"\0")
    for source in sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")]):
        digest.update(str(source.relative_to(SOURCES)).encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _compile(compiler: list[str], library: Path) -> None:
    sources = sorted(SOURCES.rglob("*.cpp"))
    torch_libraries = Path(torch.__file__).parent / "lib"
    prefix = f"build-{library.stem}-"
    for left in library.parent.glob(f"{prefix}*"):  # left by a killed process: whoever builds holds the lock
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
        with new_file(library) as file:
            file.path.write_bytes(content + _seal(content))
            file.put_in_place(mode=0o755)


def _run(command: list[str]) -> None:
    try:
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise LibraryBuildError(f"the C++ compiler {command[0]} cannot be run: {error}") from error
    if os.strerror(errno.ENOSPC) in finished.stderr:
        raise OSError(errno.ENOSPC, f"there is no disk space to compile the C++ operators: {finished.stderr.strip()}")
    if finished.returncode != 0:
        how = f"was killed by signal {-finished.returncode}" if finished.returncode < 0 else "failed"
        raise LibraryBuildError(f"the C++ compiler {how}: {' '.join(command)}\n{finished.stderr}")


def main() -> int:
    """Build the library and print its path; if that fails, print the compiler's message and return 1."""
    try:
        print(build())
    except (OSError, LibraryBuildError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
