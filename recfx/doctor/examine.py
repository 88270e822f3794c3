"""Everything that the doctor does, in its order: what is installed first, because nothing else runs without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from recfx.doctor.cann import cann
from recfx.doctor.machine import how, machine, name_of, no_device
from recfx.doctor.packages import packages
from recfx.doctor.report import Report
from recfx.doctor.write import write

DEVICES = ("cpu", "cuda", "npu")


def device_here() -> str:
    """The one that is looked at if nobody names one: an NPU, a GPU, or else the CPU."""
    return next(kind for kind in ("npu", "cuda", "cpu") if not no_device(kind))


def examine(device: str, out: Path, quick: bool = False) -> tuple[Report, list[Path]]:
    """Look at everything, and write it down; after Ctrl-C, what was found until then.

    Args:
        device: one of ``DEVICES``, perhaps with a number, as in ``npu:1``.
        out: see ``write``.
        quick: fewer shapes, and shorter measurements.

    Returns:
        The report, and the paths of its files.

    Raises:
        KeyboardInterrupt: after the files were written.
        OSError: they cannot be written.
    """
    report = Report(device, how=how(device), quick=quick)
    try:
        steps = list(_steps(device, report))
        with tqdm(steps, unit="step", leave=False, disable=None) as bar:
            for name, step in bar:
                bar.set_description(name)
                step()
        report.complete = not report.stopped
    except KeyboardInterrupt:
        report.stopped = "Stopped by Ctrl-C: the rest was not looked at."
        write(report, out)
        raise
    return report, write(report, out)


def _steps(device: str, report: Report) -> Iterator[tuple[str, Callable[[], None]]]:
    def installation() -> None:
        kind = device.partition(":")[0]
        report.findings += packages(kind)
        if kind == "npu":
            report.findings += cann()
        report.findings += machine(device)
        if reason := no_device(device):
            report.stopped = f"Nothing was run: {reason}."
        else:
            report.device_name = name_of(torch.device(device))

    yield "installation", installation
