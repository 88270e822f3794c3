"""Run a script, or code, in a process that has imported torch and TorchRec already, but not recfx."""

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.forkserver import forkserver
from tests.support.room import with_room

LONGEST = 300.0  # seconds


def run_script(
    script: Path | str, *arguments: str, environment: Mapping[str, str] | None = None, directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """``python script *arguments``, but the process ends without the interpreter's own finalization.

    Args:
        script: its path, or its code.
        arguments: of its command line.
        environment: variables to set. What reads them when torch is imported has been read.
        directory: where it runs; default: here.
    """
    printed = [os.memfd_create(name) for name in ("stdout", "stderr")]
    files = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in printed]
    place = str(directory or Path.cwd())
    process = forkserver().Process(target=_run, args=(script, arguments, dict(environment or {}), place, files))
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join(60)
        raise subprocess.TimeoutExpired(str(script), LONGEST)
    texts = []
    for descriptor in printed:
        with open(descriptor, "rb") as file:
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([str(script), *arguments], process.exitcode or 0, *texts)


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m name *arguments``, in the same way."""
    return run_script(f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)", *arguments)


def _run(
    script: Path | str, arguments: tuple[str, ...], environment: dict[str, str], directory: str, files: list[str]
) -> None:
    for standard, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), standard)
    os.chdir(directory)
    os.environ.update(environment)
    if isinstance(script, str):
        sys.argv = ["-c", *arguments]
        with_room(exec, compile(script, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.parent))
        with_room(runpy.run_path, str(script), run_name="__main__")
