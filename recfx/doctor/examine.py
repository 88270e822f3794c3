"""Everything that the doctor does, in its order: what is installed first, because nothing else runs without it."""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm

from recfx.doctor.answer import Answer
from recfx.doctor.attempt import attempt
from recfx.doctor.cann import cann
from recfx.doctor.fast import measure
from recfx.doctor.machine import how, machine, name_of, no_device
from recfx.doctor.packages import packages
from recfx.doctor.report import Report
from recfx.doctor.right import kernels_here
from recfx.doctor.training import trainings
from recfx.doctor.write import stem_of, write


def device_here() -> str:
    """The one that is looked at if nobody names one: an NPU, a GPU, or else the CPU."""
    return next(kind for kind in ("npu", "cuda", "cpu") if not no_device(kind))


def examine(device: str, out: Path, quick: bool = False) -> tuple[Report, list[Path]]:
    """Look at everything, and write it down; after Ctrl-C, what was found until then.

    Args:
        device: ``cpu``, ``cuda`` or ``npu``, perhaps with a number, as in ``npu:1``.
        out: a directory that exists, or the path of the two files without its end; see ``stem_of``.
        quick: fewer shapes, and shorter measurements.

    Returns:
        The report, and the paths of its files.

    Raises:
        KeyboardInterrupt: after the files were written.
        OSError: they cannot be written; before anything is looked at, if that can be known.
    """
    stem = stem_of(out)
    report = Report(device, how=how(device), quick=quick)
    try:
        _look(report, device)
        if not report.stopped:
            _run(report, torch.device(device))
            report.complete = True
    except KeyboardInterrupt:
        report.stopped = "Stopped by Ctrl-C: the rest was not looked at."
        write(report, stem)
        raise
    return report, write(report, stem)


def _look(report: Report, device: str) -> None:
    """What is installed."""
    kind = device.partition(":")[0]
    report.findings += packages(kind)
    if kind == "npu":
        report.findings += cann()
    report.findings += machine(device)
    if reason := no_device(device):
        report.stopped = f"Nothing was run: {reason}."
    else:
        report.device_name = name_of(torch.device(device))


def _run(report: Report, device: torch.device) -> None:
    """What runs."""
    with tqdm([*kernels_here(device), *trainings(device)], unit="check", leave=False, disable=None) as bar:
        for name, check in bar:
            bar.set_description(name)
            report.answers.append(check(report.quick))
    if report.how == "real":
        begun = [""]

        def measure_all() -> None:
            with tqdm(measure(report, device), unit="measured", leave=False, disable=None) as measured:
                for name in measured:
                    measured.set_description(name)
                    begun.append(name)

        failure = attempt(measure_all)
        if failure.message:
            told = (report.workload, failure.message, failure.traceback)
            report.answers.append(Answer(f"measuring: {begun[-1]}", "device", 1, 1, *told))
