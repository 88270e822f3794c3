"""The C++ libraries that a wheel carries, one for each minor version of torch: its C++ interface changes with it.

A wheel holds them in ``libraries``, beside this module. Whoever can write there can write to recfx's own modules as
well, so it does not matter who owns the files. Which one serves is decided by its name: the minor version of torch, and
a digest of the sources, so that a library that was made from other sources is never taken.
"""

from __future__ import annotations

import re
from pathlib import Path

from recfx.kernels.build.compiler import digest_of

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
