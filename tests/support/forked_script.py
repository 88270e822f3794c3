"""Run a script in a process that has imported torch and TorchRec already."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

from tests.support.forkserver import forkserver

LONGEST = 300.0  # seconds


def run_script(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python path *arguments``, but the process ends without the interpreter's own finalization."""
    printed = [os.memfd_create(name) for name in ("stdout", "stderr")]
    files = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in printed]
    process = forkserver().Process(target=_run, args=(path, arguments, files))
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join()
        raise subprocess.TimeoutExpired(str(path), LONGEST)
    texts = []
    for descriptor in printed:
        with open(descriptor, "rb") as file:
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([str(path), *arguments], process.exitcode or 0, *texts)


def _run(path: Path, arguments: tuple[str, ...], files: list[str]) -> None:
    for standard, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), standard)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
