"""Builds and loads the C++ operators of namespace ``recfx``: one shared library that does not depend on Python.

A wheel brings it along for each version of torch that it supports (``compiler.py``). If none serves, the library is
built from ``csrc`` with the system's C++ compiler the first time it is needed. It is then kept in ``$RECFX_BUILD_DIR``
(default: ``recfx`` in the user's cache directory), under a name that contains a digest of everything that it is made
from. ``python -m recfx.kernels`` builds it in advance, if it has to be, and prints its path, which a C++ server can
pass to ``dlopen``.

Loading a library runs its code, so what was built is loaded only if nobody else can write to the file or its directory
(see ``private_files.py``).

Without a library, ``load()`` returns ``False``, ``why_not()`` says why, and a warning is logged once. ``operators()``
then has the same operators with the same signatures, which are read from the sources, and those with a reference in
torch (``reference``) run by it. With the library, the references run on devices other than the CPU.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from recfx.kernels.build.compiler import (
    LibraryBuildError,
    compile_library,
    digest_of,
    find_compiler,
    packaged_library,
    torch_flags,
)
from recfx.kernels.build.private_files import make_private_directory, new_file, refuse_unsafe

_logger = logging.getLogger("recfx")
SOURCES = Path(__file__).resolve().parents[1] / "csrc"
_loaded: bool | None = None  # None: not tried so far
_reason = ""
_path: Path | None = None
_when_defined: list[Callable[[], object]] = []
_fragment: torch.library.Library | None = None  # keeps what was registered from Python alive
_DEFINITION = re.compile(r'library\.def\(\s*((?:"[^"]*"\s*)+)')
REFERENCES: dict[str, Callable[..., Any]] = {}
"""The functions in torch by which operators run where they have no kernel, by the operator's name."""
_loading = threading.RLock()
WHAT_TO_DO = (
    "install recfx again from its wheel, if that is for this version of torch, or install a C++ compiler; "
    "python -m recfx.kernels shows what is wrong."
)
"""Where there is no library."""


def _in_child() -> None:
    global _loading
    _loading = threading.RLock()  # the thread that held it does not exist here and cannot release it


os.register_at_fork(after_in_child=_in_child)


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
        opened = True
    except LibraryBuildError as error:
        _reason = str(error).partition("\n")[0]
        _logger.warning("C++ operators are not available; using the slower torch references instead: %s", _reason)
        for schema in schemas():
            if not hasattr(torch.ops.recfx, schema.partition("(")[0]):
                _library().define(schema)
        opened = False
    _register()
    _loaded = opened


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
    path, why = came_with_recfx()
    if path is None:
        try:
            path = build()
            _load_file(path)
        except (OSError, LibraryBuildError) as error:
            raise LibraryBuildError(f"{why}, and none can be made here: {error}") from error
    _path = _path or path  # operators are those of the first library that has them


def _load_file(path: Path) -> None:
    try:
        torch.ops.load_library(str(path))
    except OSError as error:  # of which newer versions of torch say why in its cause alone
        why = str(error.__cause__ or error).removeprefix(f"{path}: ")
        raise OSError(f"{path} cannot be loaded: {why}") from error


def why_not() -> str:
    """Why ``load()`` answered ``False``, in one line; empty if it did not."""
    return _reason


_F = TypeVar("_F", bound=Callable[..., Any])


def reference(name: str) -> Callable[[_F], _F]:
    """Decorator: the operator of this name runs by the function on devices for which it has no other kernel."""

    def register(function: _F) -> _F:
        REFERENCES[name] = function
        once_defined(partial(_implement, name, function, "CompositeExplicitAutograd"))
        return function

    return register


def kernel(name: str, *dispatch_keys: str) -> Callable[[_F], _F]:
    """Decorator: the operator of this name runs by the function on the devices of these dispatch keys of torch."""

    def register(function: _F) -> _F:
        for key in dispatch_keys:
            once_defined(partial(_implement, name, function, key))
        return function

    return register


def fake(*names: str) -> Callable[[_F], _F]:
    """Decorator: the function returns what these operators return, without numbers. Only for those that return some."""

    def register(function: _F) -> _F:
        for name in names:
            once_defined(partial(torch.library.register_fake, f"recfx::{name}", function))
        return function

    return register


def _implement(name: str, function: Callable[..., Any], dispatch_key: str) -> None:
    _library().impl(name, function, dispatch_key)


def once_defined(register: Callable[[], object]) -> None:
    """Call the function as soon as the operators exist. What it raises, ``load()`` raises each time."""
    if _loaded is None:
        _when_defined.append(register)
    else:
        register()


def _library() -> torch.library.Library:
    global _fragment
    if _fragment is None:
        _fragment = torch.library.Library("recfx", "FRAGMENT")
    return _fragment


def came_with_recfx() -> tuple[Path | None, str]:
    """The library of a wheel for the torch that is installed, which is then loaded; or None, and why there is none."""
    try:
        path = packaged_library(torch.__version__, torch.compiled_with_cxx11_abi(), SOURCES)
        if path is None:
            return None, f"recfx came without a C++ library for torch {torch.__version__}"
        _load_file(path)
    except OSError as error:  # also of a torch that was built unlike those on package indexes
        _logger.warning("%s. What to do: install recfx again.", error)
        return None, str(error)
    return path, ""


def build() -> Path:
    """The path of an up-to-date library that was compiled here, which is done now if there is none yet.

    Raises:
        LibraryBuildError: there is no compiler, or it failed; the message contains its output.
        OSError: the directory is not writable, or (``UnsafeError``) others may write to it: ``RECFX_BUILD_DIR`` names
            another one.
    """
    directory = build_directory()
    library = directory / f"librecfx-{_digest()}.so"
    # The default is in the user's own cache, where nobody else needs to write.
    make_private_directory(directory, tighten=not os.environ.get("RECFX_BUILD_DIR"))
    if not library.exists():
        compiler = find_compiler()
        with _locked(library.with_suffix(".lock")):  # several processes may get here at once: one compiles
            if not library.exists():
                _logger.warning("compiling the C++ operators, which takes a minute or two, into %s", library)
                _compile(compiler, library)
    refuse_unsafe(library)
    return library


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
    """The directory in which built libraries are kept.

    Raises:
        FileNotFoundError: this user has no home.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    # Not every way to set a variable goes through a shell.
    directory = os.path.expanduser(os.environ.get("RECFX_BUILD_DIR") or f"{caches}/recfx")
    if directory.startswith("~"):
        raise FileNotFoundError("this user has no home directory")
    return Path(directory)


def _digest() -> str:
    """The digest of all that a library compiled here is made from."""
    flags = torch_flags(_torch_root(), torch.compiled_with_cxx11_abi())
    return digest_of(SOURCES, torch.__version__, str(torch.version.git_version), os.environ.get("CXX", ""), *flags)


def _torch_root() -> Path:
    return Path(torch.__file__).parent


def _compile(compiler: list[str], library: Path) -> None:
    prefix = f"build-{library.stem}-"
    for left in library.parent.glob(f"{prefix}*"):  # left by a killed process: whoever builds holds the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=library.parent) as scratch:
        torch_libraries = _torch_root() / "lib"
        linked = compile_library(
            compiler, SOURCES, Path(scratch),
            torch_flags(_torch_root(), torch.compiled_with_cxx11_abi()),
            [f"-L{torch_libraries}", f"-Wl,-rpath,{torch_libraries}"],
        )  # fmt: skip
        with new_file(library) as file:
            file.path.write_bytes(linked.read_bytes())
            file.put_in_place(mode=0o755)


def main() -> int:
    """Print the path of the library, built if there is none; if that fails, print why and return 1."""
    path, why = came_with_recfx()
    try:
        print(path or build())
    except (OSError, LibraryBuildError) as error:
        print(f"{why}, and none can be made here: {error}", file=sys.stderr)
        return 1
    return 0
