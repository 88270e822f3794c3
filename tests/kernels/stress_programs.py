"""C++ programs that use kernels without torch, compiled with a sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from recfx.kernels.build import library

HEADERS = Path(library.__file__).resolve().parents[1] / "csrc"


def build(name: str, sanitizer: str, folder: Path) -> list[str]:
    """Compile a program of this folder, and return the command that runs it.

    Args:
        name: its file without ``.cpp``.
        sanitizer: as after ``-fsanitize=``.
        folder: where it goes.
    """
    built = folder / name
    compiler = os.environ.get("CXX", "g++").split()
    flags = ["-std=c++20", "-O0", "-g1", f"-fsanitize={sanitizer}", "-pthread", "-ffp-contract=off", f"-I{HEADERS}"]
    if shutil.which(compiler[0]) is None and not os.environ.get("CI"):
        pytest.skip(f"no C++ compiler {compiler[0]}")
    source = Path(__file__).with_name(f"{name}.cpp")
    command = [*compiler, *flags, str(source), "-o", str(built)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    missing = re.search(r"cannot find .*san|(unsupported|unrecognized) .*sanitize", finished.stderr)
    if finished.returncode != 0 and missing and not os.environ.get("CI"):
        pytest.skip(f"the compiler has no sanitizer {sanitizer}")
    assert finished.returncode == 0, finished.stderr
    # Address space randomisation beyond what older sanitizers can place their shadow memory in.
    return [*(["setarch", "-R"] if shutil.which("setarch") else []), str(built)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, or to the first thing that its sanitizer finds."""
    settings = {
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",  # a table that is torn while it is read may have no end
        "ASAN_OPTIONS": "exitcode=66",
        "UBSAN_OPTIONS": "halt_on_error=1 exitcode=66",
    }
    environment = {**os.environ, **settings}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
