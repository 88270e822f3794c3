"""Tests of this folder run in a process that sees a simulated NPU; the process that collects them reports what it says.

A file with ``MAY_FALL_BACK = True`` lets torch_npu run operators on the host that it has no kernel for; elsewhere only
those may, that ``host_round_trips.md`` lists. A file with ``INTERPRETED = True`` runs with ``TRITON_INTERPRET=1``.

torch_npu renames a device of torch for good, and the libraries that stand in for CANN's have to be there when it is
loaded: neither may happen in a process that tests anything else. One process runs all tests of a file, forked from one
that has imported torch where the file has neither variable. They are ordinary tests; only fixtures must not touch the
device, because they are set up in both processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.ascend import tools
from tests.ascend.npu_runtime.environment import environment, is_simulated, with_fallback
from tests.ascend.npu_runtime.forked import Forking
from tests.ascend.npu_runtime.interpreted_kernels import interpreted_kernels as interpreted_kernels
from tests.ascend.npu_runtime.simulated_kernels import simulated_kernels as simulated_kernels

REPORT = "RECFX_SIMULATED_NPU_REPORT"
LONGEST = 300.0  # seconds, for a file


@dataclass
class _Told:
    """What the process said about its tests: failures and reasons for skipping, by node id."""

    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    printed: str = ""


_told: dict[Path, _Told] = {}


@pytest.fixture(scope="session")
def npu_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes that see two simulated NPUs."""
    if is_simulated():
        return dict(os.environ)
    tools.torch_npu().require()
    tools.c_tools().require()
    return environment(tmp_path_factory.mktemp("simulated_npu"))


@pytest.fixture(scope="session")
def npu_processes(npu_environment: dict[str, str]) -> Iterator[Forking]:
    """They see two simulated NPUs, and have imported torch."""
    forking = Forking(npu_environment)
    yield forking
    forking.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    if not is_simulated() and isinstance(item, pytest.Function) and item.path.parent == Path(__file__).parent:
        item.fixturenames[:0] = ["npu_environment", "npu_processes"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if is_simulated() or pyfuncitem.path.parent != Path(__file__).parent:
        return None
    if pyfuncitem.path not in _told:
        _told[pyfuncitem.path] = _run_file(pyfuncitem)
    told, name = _told[pyfuncitem.path], pyfuncitem.nodeid
    if name in told.skipped:
        pytest.skip(told.skipped[name])
    if name in told.failed:
        pytest.fail(told.failed[name], pytrace=False)
    if name not in told.passed:
        pytest.fail(f"the process ended before this test did:\n{told.printed[-4000:]}", pytrace=False)
    return True


def _run_file(item: pytest.Function) -> _Told:
    names = [each.nodeid for each in item.session.items if each.path == item.path]
    given: dict[str, str] = item.funcargs["npu_environment"]
    if getattr(item.module, "MAY_FALL_BACK", False):
        given = with_fallback(given)
    if getattr(item.module, "INTERPRETED", False):
        given = {**given, "TRITON_INTERPRET": "1"}
    report = Path(given["PYTHONPATH"].split(os.pathsep)[1]) / f"{item.path.stem}.jsonl"
    printed = report.with_suffix(".txt")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *names]
    printed.touch()
    if given is item.funcargs["npu_environment"]:
        item.funcargs["npu_processes"].run(options, {REPORT: str(report)}, printed, LONGEST)
    else:
        with printed.open("w") as file:
            subprocess.run(
                [sys.executable, "-m", "pytest", *options], env={**given, REPORT: str(report)},
                cwd=item.config.rootpath, stdout=file, stderr=subprocess.STDOUT, timeout=LONGEST, check=False,
            )  # fmt: skip
    told = _Told(printed=printed.read_text())
    for line in report.read_text().splitlines() if report.exists() else []:
        said: dict[str, Any] = json.loads(line)
        if said["outcome"] == "failed":
            told.failed[said["name"]] = said["text"]
        elif said["outcome"] == "skipped":
            told.skipped[said["name"]] = said["text"]
        elif said["when"] == "call":
            told.passed.add(said["name"])
    return told


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = os.environ.get(REPORT)
    if path is None:
        return
    said = {"name": report.nodeid, "when": report.when, "outcome": report.outcome, "text": report.longreprtext}
    with open(path, "a") as file:
        print(json.dumps(said), file=file)
