"""The C++ libraries of mutants: built before the tests run, without compiling again what has no fault."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.tools.mutants import compile_once


class Libraries:
    """Builds the library of a copy of the repository, with the compiler that the product looks for first.

    Args:
        copy: the repository.
        folder: where what was compiled is kept, and each library while its mutant is judged.
    """

    def __init__(self, copy: Path, folder: Path) -> None:
        self._copy = copy
        self._built, kept, bin_ = (folder / name for name in ("built", "objects", "bin"))
        compiler = shutil.which("g++")
        for directory in (kept, bin_):
            directory.mkdir(parents=True)
        if compiler is not None:
            command = [sys.executable, compile_once.__file__, str(kept), compiler]
            (bin_ / "g++").write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            (bin_ / "g++").chmod(0o700)
        self._path = os.pathsep.join([str(bin_), os.environ.get("PATH", os.defpath)])

    def build(self) -> dict[str, str] | None:
        """The environment in which tests run with the library of the copy as it is now; None if it does not compile."""
        shutil.rmtree(self._built, ignore_errors=True)
        self._built.mkdir(mode=0o700)
        environment = {"RECFX_BUILD_DIR": str(self._built)}
        finished = subprocess.run(
            [sys.executable, "-m", "recfx.kernels"],
            cwd=self._copy,
            env={**os.environ, **environment, "PATH": self._path, "PYTHONPATH": str(self._copy)},
            capture_output=True,
            check=False,
        )
        return environment if finished.returncode == 0 else None
