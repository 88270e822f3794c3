"""How fast the kernels are here, as a share of what a copy moves, and which numbers are best for each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

import torch

from recfx.doctor.clock import median_ms
from recfx.doctor.finding import warning
from recfx.doctor.machine import name_of
from recfx.doctor.report import Report
from recfx.doctor.speed import Choice, Speed
from recfx.doctor.workload import Measured, Workload, size_for
from recfx.kernels.build import tuned
from recfx.kernels.build.chip_model import MEMORY_BANDWIDTH
from recfx.kernels.build.tiling import ASCEND_910B

CANDIDATES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    tuned.PROGRAMS_PER_CORE: {"npu": (1, 2, 4), "cuda": (32, 8, 16, 64)},
    tuned.ROWS_IN_FLIGHT: {"npu": (32, 16, 8), "cuda": (8, 16, 32)},
}
"""Programs of a kernel that share a core, and rows for which a lookup asks at a time; the default first."""

WORTH = 0.97
"""Another number than the default has to take at most this share of its time."""


def measure(report: Report, device: torch.device) -> Iterator[str]:
    """Measure one thing after the other into the report; yields the name of each before it is measured."""
    size = size_for(device, report.quick)
    report.workload = str(size)
    yield "tables and a batch"
    workload = Workload(device, size)
    # Bytes per second of the chip's memory, by its data sheet.
    limit = MEMORY_BANDWIDTH if device.type == "npu" and name_of(device) == ASCEND_910B.name else None
    copied = 0.0  # bytes per millisecond
    measured: list[Measured] = []
    for call in (workload.copy(), *workload.calls()):
        yield call.name
        milliseconds = median_ms(call.run, device, report.quick)
        speed = call.bytes / milliseconds
        copied = copied or speed
        of_chip = None if limit is None else speed * 1e3 / limit
        report.speeds.append(Speed(call.name, milliseconds, call.bytes, speed / copied, of_chip))
        measured.append(call)
    if device.type == "cpu":
        yield "threads"
        report.choices += _threads(measured, report.quick)
        return
    kept: dict[str, dict[str, int]] = {}
    with contextlib.ExitStack() as chosen:  # what is chosen for one setting is in use while the next is tried
        for setting, call in product(CANDIDATES, measured):
            if call.kernel in tuned.ALLOWED[setting]:
                yield _name_of(setting, call)
                choice = best_of(call, setting, device, report.quick)
                report.choices.append(choice)
                kept.setdefault(setting, {})[call.kernel] = choice.chosen
                chosen.enter_context(tuned.trying(setting, call.kernel, choice.chosen))
    if kept and not report.quick:
        try:
            path = tuned.keep(name_of(device), kept)
            report.choices = [replace(choice, kept_in=str(path)) for choice in report.choices]
        except OSError as error:
            advice = "set RECFX_BUILD_DIR to a directory of your own that nobody else can write to"
            report.findings.append(warning("tuned.json", f"what is fastest cannot be kept: {error}", advice))


def best_of(call: Measured, setting: str, device: torch.device, quick: bool) -> Choice:
    """Try each number of a setting, and choose the fastest if it is worth it."""
    candidates = CANDIDATES[setting][device.type]
    times = {}
    for number in candidates:
        with tuned.trying(setting, call.kernel, number):
            times[number] = median_ms(call.run, device, quick)
    default, best = candidates[0], min(candidates, key=times.__getitem__)
    chosen = best if times[best] <= WORTH * times[default] else default
    return Choice(_name_of(setting, call), times, chosen)


def _name_of(setting: str, call: Measured) -> str:
    return f"{setting.replace('_', ' ')} of {call.kernel}"


def _threads(calls: list[Measured], quick: bool) -> Iterator[Choice]:
    """How the pooled lookup scales. Nothing is kept: torch's number of threads is the user's."""
    used = torch.get_num_threads()
    for call in (call for call in calls if call.name == "pooled lookup" and used > 1):
        times = {used: median_ms(call.run, torch.device("cpu"), quick)}
        try:
            torch.set_num_threads(1)
            times[1] = median_ms(call.run, torch.device("cpu"), quick)
        finally:
            torch.set_num_threads(used)
        yield Choice("threads of torch, for a pooled lookup", times, used)
