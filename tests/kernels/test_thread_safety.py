"""The index and the fused step under sanitizers: C++ programs without torch.

The thread sanitizer judges by the memory model of C++, whatever the machine: it finds a race if any acquire or release
in ``index_lock.h`` is made relaxed, which an x86-64 would not show.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.stress_programs import build, run


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
