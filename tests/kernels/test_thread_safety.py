"""The index under the thread sanitizer: a C++ program of readers and writers, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from recfx.kernels import library

PROGRAM = Path(__file__).with_name("index_stress.cpp")
HEADERS = Path(library.__file__).resolve().parent / "csrc"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    built = tmp_path_factory.mktemp("tsan") / "index_stress"
    compiler = os.environ.get("CXX", "g++").split()
    command = [*compiler, "-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread", f"-I{HEADERS}", str(PROGRAM)]
    if shutil.which(compiler[0]) is None and not os.environ.get("CI"):
        pytest.skip(f"no C++ compiler {compiler[0]}")
    finished = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True, check=False)
    if "tsan" in finished.stderr and not os.environ.get("CI"):
        pytest.skip("the compiler has no thread sanitizer")
    assert finished.returncode == 0, finished.stderr
    # Address space randomisation beyond what older sanitizers can place their shadow memory in.
    return [*(["setarch", "-R"] if shutil.which("setarch") else []), str(built)]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # At the first race: a table that is torn while it is read may have no end.
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)


def test_readers_and_writers_do_not_race(program: list[str]) -> None:
    finished = run(program)
    assert (finished.returncode, finished.stdout) == (0, "done\n"), finished.stderr


def test_the_sanitizer_would_have_noticed(program: list[str]) -> None:
    finished = run([*program, "without-lock"])
    assert finished.returncode == 66
    assert "data race" in finished.stderr
