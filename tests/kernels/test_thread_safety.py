"""The index and the fused step under sanitizers: C++ programs without torch.

The thread sanitizer judges by the memory model of C++, whatever the machine: it finds a race if any acquire or release
in ``index_lock.h`` is made relaxed, which an x86-64 would not show.
"""

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


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return build("index_stress", "thread", tmp_path_factory.mktemp("tsan"))


def test_readers_and_writers_do_not_race(index: list[str]) -> None:
    finished = run(index)
    assert (finished.returncode, finished.stdout) == (0, "done\n"), finished.stderr


def test_the_index_stays_within_its_buffers(tmp_path: Path) -> None:
    finished = run(build("index_stress", "address,undefined", tmp_path))
    assert (finished.returncode, finished.stdout) == (0, "done\n"), finished.stderr


def test_the_sanitizer_would_have_noticed(index: list[str]) -> None:
    finished = run([*index, "without-lock"])
    assert finished.returncode == 66
    assert "data race" in finished.stderr


@pytest.mark.parametrize(("sanitizer", "rounds"), [("thread", "8"), ("address,undefined", "40")])
def test_threads_that_step_rows(sanitizer: str, rounds: str, tmp_path: Path) -> None:
    program = build("step_stress", sanitizer, tmp_path)
    finished = run([*program, rounds])
    assert (finished.returncode, finished.stdout) == (0, "done\n"), finished.stderr
    if sanitizer != "thread":
        finished = run([*program, "beyond"])
        assert finished.returncode == 66
        assert "heap-buffer-overflow" in finished.stderr or "SEGV" in finished.stderr
