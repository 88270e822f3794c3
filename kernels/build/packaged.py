"""The C++ libraries that a wheel carries, one for each minor version of torch: its C++ interface changes with it.

A wheel holds them in ``libraries``, beside this module. Whoever can write there can write to recfx's own modules as
well, so it does not matter who owns the files. Which one serves is decided by its name: the minor version of
torch, and a digest of the sources, so that a library that was made from other sources is never taken. Its seal holds
this name and the architecture, because a library of another torch or machine may end the process that loads it.
"""

from __future__ import annotations

import hashlib
import platform
import re
from pathlib import Path

from recfx.kernels.build.compiler import digest_of

LIBRARIES = Path(__file__).resolve().parent / "libraries"
MACHINES = ("x86_64", "aarch64")
"""Those that wheels are made for."""

# Written at the end of a library, where loaders do not look.
_SEAL = b"recfx-sealed:"


def library_name(torch_version: str, sources: Path) -> str:
    """The name of the file that serves a version of torch, such as ``2.13.0+cpu``."""
    minor = re.match(r"\d+\.\d+", torch_version)
    return f"librecfx-torch{minor[0] if minor else torch_version}-{digest_of(sources)}.so"


class UnusableError(OSError):
    """A library that came with recfx is damaged, or was made for something else."""


def packaged_library(torch_version: str, cxx11_abi: bool, sources: Path) -> Path | None:
    """The library for this torch that came with recfx; None if there is none.

    Args:
        torch_version: of the torch that is to load it.
        cxx11_abi: whether that torch was built with the C++11 ABI of libstdc++, as all that packages carry were.
        sources: the folder of the sources.

    Raises:
        UnusableError: it is not what its name says; the message says what it is.
        OSError: it cannot be read.
    """
    path = LIBRARIES / library_name(torch_version, sources)
    if not cxx11_abi or not path.is_file():
        return None
    content, here = path.read_bytes(), platform.machine()
    machines = [machine for machine in (here, *MACHINES) if is_sealed(content, made_for(path.name, machine))]
    if here in machines:
        return path
    raise UnusableError(
        f"{path} is for {machines[0]}, and this machine is {here}"
        if machines
        else f"{path} is damaged, or of another torch"
    )


def made_for(name: str, machine: str) -> str:
    """What the seal of a packaged library says besides its content: its file's name, and ``x86_64`` or ``aarch64``."""
    return f"{name} {machine}"


def seal(content: bytes, what_for: str) -> bytes:
    """What ends a library of this content, by which it is seen to be whole, and to be what it was made for."""
    return _SEAL + hashlib.sha256(what_for.encode() + content).hexdigest().encode()


def is_sealed(content: bytes, what_for: str) -> bool:
    """Whether a file's content ends with its seal."""
    return content.endswith(seal(content[: -len(seal(b"", ""))], what_for))
