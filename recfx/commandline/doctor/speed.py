"""How fast the kernels are here, as a share of what a copy moves, and which launch settings are best for each."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from tqdm import tqdm

from recfx.commandline.doctor.cases import LookupCase
from recfx.commandline.doctor.checks import Call, attempt, calls_of, kernels_here, lookups_of_kinds, moved
from recfx.commandline.doctor.report import Answer, Choice, Report, Speed
from recfx.kernels.build import launch, tiling, tuned

CANDIDATES: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    tuned.WARPS: {"npu": (), "cuda": (1, 2, 4)},
    tuned.PROGRAMS_PER_CORE: {"npu": (1, 2, 4), "cuda": (64, 16, 32, 128)},
    tuned.ROWS_IN_FLIGHT: {"npu": (32, 16, 8), "cuda": ()},
    tuned.VENDOR: {"npu": (1, 0), "cuda": ()},
}
"""Warps of a program, programs of a kernel that share a core, rows for which a lookup asks at a time, and whether the
vendor's operators look up; the default first. An NPU has no warps, the forms of lookups for GPUs have no rows in
flight, and there is no vendor's form.
"""

_WORTH = 0.97  # another number than the default has to take at most this share of its time
_MOST_SECONDS = 2.0  # after which no further repeat begins
_AHEAD = 64 << 20  # bytes of a copy that the device is busy with while the host launches what is measured


def workload(device: torch.device, quick: bool) -> LookupCase:
    """As large as the README's on a device; a CPU gets fewer tables."""
    tables, rows, batch = (4, 20_000, 512) if quick else (8 if device.type == "cpu" else 26, 100_000, 2048)
    return LookupCase([64] * (tables - 1), batch, rows=rows, longest=20)


def measure(report: Report, device: torch.device) -> None:
    """Measure one call after the other into the report, then choose the settings of launches, until something fails."""
    case = workload(device, report.quick)
    report.workload = str(case)
    message, trace = attempt(lambda: _measure_all(report, device, case))
    if message:
        what = f"measuring after {report.speeds[-1].name}" if report.speeds else "measuring a copy"
        report.answers.append(Answer(what, "device", 1, 1, report.workload, message, trace))


def _measure_all(report: Report, device: torch.device, case: LookupCase) -> None:
    source = torch.zeros((64 if device.type == "cpu" else 512) << 20, dtype=torch.uint8)
    copy = Call("copy", torch.Tensor.copy_, torch.Tensor.copy_, (source, source), bytes=2 * source.numel())
    calls = chain.from_iterable(calls_of(case, kind) for kind, place in kernels_here(device) if place == device)
    measured: dict[str, Call] = {}
    for call in tqdm(chain([copy], calls), unit="measured", leave=False, disable=None):
        if call.bytes:
            milliseconds = median_ms(call, device, report.quick)
            copied = report.speeds[0] if report.speeds else Speed("copy", milliseconds, call.bytes, 1.0)
            share = call.bytes / milliseconds * copied.milliseconds / copied.bytes
            report.speeds.append(Speed(call.name, milliseconds, call.bytes, share))
            measured.setdefault(kernel_on(device, call.kernel), call)
    kept: dict[str, dict[str, int]] = {}
    with contextlib.ExitStack() as chosen:  # what is chosen for one setting is in use while the next is tried
        for setting in (setting for setting in CANDIDATES if CANDIDATES[setting].get(device.type)):
            for kernel, call in lookups_of_kinds(report.quick) if setting == tuned.VENDOR else measured.items():
                numbers = CANDIDATES[setting][device.type] if kernel in tuned.ALLOWED[setting] else ()
                if setting == tuned.VENDOR:  # its numbers are implementations, which may be wrong
                    numbers = right_numbers(report, call, setting, kernel, device)
                if numbers:
                    choice = best_of(call, setting, kernel, numbers, device, report.quick)
                    report.choices.append(choice)
                    kept.setdefault(setting, {})[kernel] = choice.chosen
                    chosen.enter_context(tuned.trying(setting, kernel, choice.chosen))
    if kept and not report.quick:
        path = tuned.keep(report.device_name, kept)
        report.choices = [replace(choice, kept_in=str(path)) for choice in report.choices]


def kernel_on(device: torch.device, kernel: str) -> str:
    """The name of the kernel, or of its form for GPUs."""
    form = f"{kernel}_on_gpu"
    return form if launch.takes_gpu_forms(device) and form in tiling.ON_GPU else kernel


def right_numbers(report: Report, call: Call, setting: str, kernel: str, device: torch.device) -> tuple[int, ...]:
    """The numbers of a setting with which a call does what its reference does; the report says what is wrong."""
    answers = {}
    for number in CANDIDATES[setting][device.type]:
        with tuned.trying(setting, kernel, number):
            wrong = attempt(partial(call.mismatch, device))
        answers[number] = Answer(f"{setting} {number} of {kernel}", "device", 1, int(wrong[0] != ""), kernel, *wrong)
    report.answers += [answer for answer in answers.values() if answer.wrong]
    return tuple(number for number, answer in answers.items() if not answer.wrong)


def best_of(
    call: Call, setting: str, kernel: str, candidates: Sequence[int], device: torch.device, quick: bool
) -> Choice:
    """Try each number of a setting for a kernel or a kind of lookups, and choose the fastest if it is worth it."""
    times = {}
    for number in candidates:
        with tuned.trying(setting, kernel, number):
            times[number] = median_ms(call, device, quick)
    default, best = candidates[0], min(candidates, key=times.__getitem__)
    chosen = best if times[best] <= _WORTH * times[default] else default
    return Choice(f"{setting.replace('_', ' ')} of {kernel}", times, chosen)


def median_ms(call: Call, device: torch.device, quick: bool) -> float:
    """Milliseconds: the median of some calls, after some that are not counted.

    On a device, a copy runs before each, so that the host is ahead with its launches: what is measured is the device.
    """
    repeats, warm_up = (3, 1) if quick else (15, 3)
    run = partial(call.operator, *moved(call.arguments, device))
    timed = partial(timeit.timeit, run, number=1) if device.type == "cpu" else _on_device(run, device)
    gc.collect()
    for _ in range(warm_up):
        timed()
    end, seconds = time.perf_counter() + _MOST_SECONDS, [timed()]
    while len(seconds) < repeats and time.perf_counter() < end:
        seconds.append(timed())
    return 1e3 * statistics.median(seconds)


def _on_device(run: Callable[[], object], device: torch.device) -> Callable[[], float]:
    module = torch.get_device_module(device)
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    source = torch.zeros(_AHEAD, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def timed() -> float:
        target.copy_(source)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return timed
