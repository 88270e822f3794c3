"""Runs the tests of one mutant, in a copy of the repository."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LONGEST_TEST = 180
"""Seconds after which a test hangs, and the mutant counts as noticed."""
_OPTIONS = ("-x", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=recfx-ci")


@dataclass(frozen=True)
class Outcome:
    """``killed_by``: the test that failed, "the process ended", or None. ``ended``: all tests ran in the time given."""

    killed_by: str | None
    ended: bool
    seconds: float


def copy_of(repository: Path, to: Path) -> None:
    """What git knows or does not ignore; links stay links."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=repository, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (repository / name).exists() or (repository / name).is_symlink():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository / name, to / name, follow_symlinks=False)


def run_tests(copy: Path, tests: Sequence[str], seconds: float) -> Outcome:
    """Run these tests in the copy until one fails, or until the time is over."""
    start = time.monotonic()
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(ROOT))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), *given]), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *_OPTIONS, f"--timeout={LONGEST_TEST}", *tests],
        cwd=copy, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        return Outcome(None, False, time.monotonic() - start)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and the ranks that it has started
        process.wait()
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", printed, re.MULTILINE)
    killed_by = None if process.returncode in (0, 5) else failed[1] if failed else "the process ended"
    return Outcome(killed_by, True, time.monotonic() - start)
