"""Tests of this folder run in a process that sees a simulated NPU; the process that collects them reports what it says.

A file with ``MAY_FALL_BACK = True`` lets torch_npu run operators on the host that it has no kernel for; elsewhere only
those may, that ``host_round_trips.md`` lists. A file with ``INTERPRETED = True`` runs with ``TRITON_INTERPRET=1``. One
with ``OUTSIDE = True`` stays in the process that collects it, and asks for what it runs itself.

torch_npu renames a device of torch for good, and the libraries that stand in for CANN's have to be there when it is
loaded: neither may happen in a process that tests anything else. One process runs all tests of a file, forked from one
that has imported torch. They are ordinary tests; only fixtures must not touch the device, because they are set up in
both processes.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.ascend import tools
from tests.ascend.npu_runtime.environment import environment, is_simulated, with_fallback
from tests.ascend.npu_runtime.forked import Forking
from tests.ascend.npu_runtime.interpreted_kernels import interpreted_kernels as interpreted_kernels
from tests.ascend.npu_runtime.simulated_kernels import form as form
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

Processes = Callable[[bool, bool], Forking]
"""Those that see two simulated NPUs and have imported torch: with a fallback or without, and with the interpreter."""


@pytest.fixture(scope="session")
def npu_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes that see two simulated NPUs."""
    if is_simulated():
        return dict(os.environ)
    tools.torch_npu().require()
    tools.c_tools().require()
    return environment(tmp_path_factory.mktemp("simulated_npu"))


@pytest.fixture(scope="session")
def npu_processes(npu_environment: dict[str, str]) -> Iterator[Processes]:
    started: dict[tuple[bool, bool], Forking] = {}

    def processes(may_fall_back: bool, interpreted: bool) -> Forking:
        kind = may_fall_back, interpreted
        if kind not in started:
            given = with_fallback(npu_environment) if may_fall_back else npu_environment
            started[kind] = Forking({**given, "TRITON_INTERPRET": "1"} if interpreted else given)
        return started[kind]

    yield processes
    for forking in started.values():
        forking.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    if not is_simulated() and isinstance(item, pytest.Function) and item.path.parent == Path(__file__).parent:
        item.fixturenames[:0] = ["npu_environment", "npu_processes"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if is_simulated() or pyfuncitem.path.parent != Path(__file__).parent or _has(pyfuncitem, "OUTSIDE"):
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


def _has(item: pytest.Function, variable: str) -> bool:
    """Whether the test's file sets it."""
    return bool(getattr(item.module, variable, False))


def _run_file(item: pytest.Function) -> _Told:
    names = [test.nodeid for test in item.session.items if test.path == item.path]
    given: dict[str, str] = item.funcargs["npu_environment"]
    processes: Processes = item.funcargs["npu_processes"]
    report = Path(given["PYTHONPATH"].split(os.pathsep)[1]) / f"{item.path.stem}.jsonl"
    printed = report.with_suffix(".txt")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *names]
    printed.touch()
    forking = processes(_has(item, "MAY_FALL_BACK"), _has(item, "INTERPRETED"))
    forking.run(options, {REPORT: str(report)}, printed, LONGEST)
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
