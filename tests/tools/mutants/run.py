"""Runs the tests of one mutant: forked from a process that has imported torch already, in a copy of the repository."""

from __future__ import annotations

import importlib
import io
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

_PRELOADED = (
    "torch",
    "torchrec",
    "torch.distributed.checkpoint",
    "fbgemm_gpu",
    "hypothesis",
    "_pytest.assertion.rewrite",
)
LONGEST_TEST = 180.0
"""Seconds without a finished test after which a mutant counts as noticed: it hangs."""


@dataclass(frozen=True)
class Limits:
    """``processor``: seconds of processor time for all tests of one mutant, which other processes do not use up.
    ``until``: when the whole run ends, as ``time.monotonic`` has it. ``silent``: seconds without a finished test.
    """

    processor: float
    until: float
    silent: float = LONGEST_TEST

    @property
    def are_over(self) -> bool:
        return _processor_time() > self.processor or time.monotonic() > self.until


def _processor_time() -> float:
    """What this process, those that it has started and those that they have started have used, in seconds."""
    session, ticks = os.getsid(0), 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))  # its own, and that of its children that have ended
    return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Outcome:
    """``killed_by``: the test that failed, "hangs", or None. ``ended``: all tests ran before the time was over."""

    killed_by: str | None
    ended: bool
    seconds: float


def copy_of(repository: Path, to: Path) -> None:
    """What git knows or does not ignore; links stay links."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=repository,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (repository / name).exists() or (repository / name).is_symlink():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository / name, to / name, follow_symlinks=False)


def preload() -> None:
    """Import what all tests import, and nothing of ours: forked processes do not wait for it."""
    for name in _PRELOADED:
        importlib.import_module(name)


class _Tell:
    """Writes a line for each finished test, and ends the run when its time is over."""

    def __init__(self, pipe: int, limits: Limits) -> None:
        self._pipe, self._limits = pipe, limits

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self._pipe, f"failed {report.nodeid}\n".encode())
        elif report.when == "teardown":
            os.write(self._pipe, b".\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            os.write(self._pipe, f"failed {report.nodeid}\n".encode())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._limits.are_over:
            os.write(self._pipe, b"late\n")
            item.session.shouldstop = "its time is over"
            pytest.skip("its time is over")


def run_tests(copy: Path, tests: Sequence[str], limits: Limits) -> Outcome:
    """Run these tests in the copy until one fails, or until the limits."""
    start = time.monotonic()
    ours, theirs = os.pipe()
    process = os.fork()
    if process == 0:
        os.setsid()
        os.close(ours)
        _in_child(copy, tests, theirs, limits)
    os.close(theirs)
    try:
        failed, ended, hangs = _listen(ours, limits.silent)
    finally:
        os.close(ours)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # and the ranks that it has started
        os.waitpid(process, 0)
    return Outcome("hangs" if hangs else failed, ended, time.monotonic() - start)


def _listen(pipe: int, silent: float) -> tuple[str | None, bool, bool]:
    """The test that failed, whether all ran, whether one hangs."""
    text = b""
    while select.select([pipe], [], [], silent)[0]:
        new = os.read(pipe, 65536)
        text += new
        lines = text.decode(errors="replace").splitlines()
        failed = next((line.removeprefix("failed ") for line in lines if line.startswith("failed ")), None)
        if failed is not None:
            return failed, False, False
        if "no tests" in lines:
            raise SystemExit("pytest cannot run the tests of a mutant: were files moved since the run began?")
        if "end" in lines:
            return None, "late" not in lines, False
        if not new:
            return "the process ended", False, False
    return None, False, True


def _in_child(copy: Path, tests: Sequence[str], pipe: int, limits: Limits) -> None:
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with suppress(OSError):  # a fault may take all memory: this process is the one that has to go then
            Path("/proc/self/oom_score_adj").write_text("1000")
        os.chdir(copy)
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        here = str(Path(__file__).resolve().parents[3])
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), *(path for path in given if path not in ("", here))])
        sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", here))]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "recfx")]:
            del sys.modules[name]
        sys.modules["__main__"] = types.ModuleType("__main__")  # processes that tests start import it again
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=recfx-ci"]
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            status = pytest.main([*options, *tests], plugins=[_Tell(pipe, limits)])
        if status == pytest.ExitCode.USAGE_ERROR:  # also where a conftest.py cannot import what has the fault
            are_there = all(Path(test.partition("::")[0]).exists() for test in tests)
            os.write(pipe, b"failed conftest.py\n" if are_there else b"no tests\n")
        if status in (0, 2, 5):  # 2: stopped by us
            os.write(pipe, b"end\n")
    finally:
        os._exit(int(status))
