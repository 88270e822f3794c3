"""Processes of pytest-xdist that end in the middle of a test: that test has failed, and all others run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests.support.whole_files import WholeFiles

def pytest_xdist_make_scheduler(config, log):
    return WholeFiles(config, log)
"""
FILE = """
import os, time
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_it(number):
    time.sleep(0.02)
    if number in {ends}:
        os._exit(1)
"""


@pytest.mark.parametrize(
    "files",
    [
        [(6, ()), (6, ()), (6, (2,)), (6, ())],  # the others end while it is replaced
        [(6, ()), (6, ()), (6, ()), (6, (4,))],  # a single test is left
        [(1, (0,)), (1, ()), (3, (1,)), (1, (0,))],  # none is
        [(4, (0, 1, 2, 3)), (1, ())],
    ],
)
def test_all_others_run(files: list[tuple[int, tuple[int, ...]]], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    for number, (count, ends) in enumerate(files):
        (tmp_path / f"test_{number}.py").write_text(FILE.format(count=count, ends=ends))
    command = [sys.executable, "-m", "pytest", "-n2", "--dist=loadfile", "--no-loadscope-reorder", "-p", "no:timeout"]
    command += ["-rN"]  # where the environment names a CI, pytest's summary would name each of them once more
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    failed = sum(len(ends) for _, ends in files)
    passed = sum(count for count, _ in files) - failed
    assert re.search(rf"{failed} failed, {passed} passed", done.stdout), done.stdout + done.stderr
    ended = re.findall(r"crashed while running '(.*)'", done.stdout)
    expected = [f"test_{file}.py::test_it[{number}]" for file, (_, ends) in enumerate(files) for number in ends]
    assert sorted(ended) == expected
