"""Everything that the doctor does, in its order: what is installed first, because nothing else runs without it."""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm

from recfx.doctor.checks import kernels_here
from recfx.doctor.machine import how, machine, name_of, no_device
from recfx.doctor.packages import cann, packages
from recfx.doctor.report import Report
from recfx.doctor.speed import measure
from recfx.inspect.drawing.draw import write_text


def device_here() -> str:
    """The one that is looked at if nobody names one: an NPU, a GPU, or else the CPU."""
    return next(kind for kind in ("npu", "cuda", "cpu") if not no_device(kind))


def examine(device: str, quick: bool = False, out: Path | None = None) -> Report:
    """Look at everything; after Ctrl-C, the file says what was found until then.

    Args:
        device: ``cpu``, ``cuda`` or ``npu``, perhaps with a number, as in ``npu:1``.
        quick: fewer shapes, and shorter measurements.
        out: the file that gets the report as JSON, if any.

    Raises:
        KeyboardInterrupt: after the file was written.
        DrawingError: ``cannot_write``: before anything is looked at.
    """
    report = Report(device, how=how(device), quick=quick)
    report.stopped = "Stopped by Ctrl-C: the rest was not looked at."
    try:
        if out is not None:
            write_text(out, "")
        kind = device.partition(":")[0]
        report.findings += packages(kind)
        report.findings += cann() if kind == "npu" else ()
        report.findings += machine(device)
        if reason := no_device(device):
            report.stopped = f"Nothing was run: {reason}."
        else:
            there = torch.device(device)
            report.device_name = name_of(there)
            for check, where, name in tqdm([*kernels_here(there)], unit="kernel", leave=False, disable=None):
                report.answers.append(check.run(where, name, quick))
            if report.how == "real":
                measure(report, there)
            report.complete, report.stopped = True, ""
    finally:
        if out is not None:
            write_text(out, report.to_json() + "\n")
    return report
