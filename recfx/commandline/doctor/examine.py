"""Everything that the doctor does, in its order: what is installed first, because nothing else runs without it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from recfx.commandline.doctor.checks import check_all
from recfx.commandline.doctor.packages import cann, packages
from recfx.commandline.doctor.report import Finding, Report
from recfx.commandline.doctor.speed import measure
from recfx.kernels.build import launch, library
from recfx.versions.sets import nearest

_ADVICE = {
    "cuda": "install a driver, and a torch that was built for CUDA; nvidia-smi shows what the driver sees",
    "npu": "npu-smi info shows what the driver sees; ASCEND_RT_VISIBLE_DEVICES may hide devices",
}


def device_here() -> str:
    """The one that is looked at if nobody names one: an NPU, a GPU, or else the CPU."""
    return next(kind for kind in ("npu", "cuda", "cpu") if not no_device(kind))


def no_device(device: str) -> str:
    """Why there is no device of this name, such as ``npu:1``, in a few words; ``""`` if there is."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return ""
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return f"torch {torch.__version__} sees no {kind} device"
    count = module.device_count()
    return "" if int(number or 0) < count else f"there are {count} {kind} devices, numbered from 0"


def name_of(device: torch.device) -> str:
    """What the driver calls the device; launches know by it what was tuned."""
    return "CPU" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))


def machine(device: str) -> Iterator[Finding]:
    """The device, the Triton that would compile for it, and recfx's library, which may be compiled for this."""
    kind = device.partition(":")[0]
    if reason := no_device(device):
        yield Finding("device", reason, _ADVICE[kind])
    else:
        there = torch.device(device)
        yield Finding(
            "device", f"{name_of(there)}; torch uses {torch.get_num_threads()} of {os.cpu_count()} logical cores"
        )
        if kind == "cpu" and not launch.is_interpreted():
            yield Finding("Triton", "not used on the CPU, where kernels are in C++")
        elif reason := launch.why_not(there):
            fit = nearest(torch.__version__)
            package = f"triton-ascend=={fit.triton_ascend}" if kind == "npu" else f"triton=={fit.triton}"
            install = f"pip uninstall triton triton-ascend; pip install {package}"
            yield Finding("Triton", reason.rstrip("."), install)
        else:
            yield Finding("Triton", "in its interpreter" if launch.is_interpreted() else "runs here")
    if library.load():
        yield Finding("recfx's library", str(library.loaded_path()))
    else:
        yield Finding("recfx's library", f"not loaded: {library.why_not()}", "python -m recfx.kernels shows why")


def examine(device: str, quick: bool = False) -> Report:
    """Look at everything on ``cpu``, ``cuda`` or ``npu``, perhaps with a number, as in ``npu:1``.

    ``quick``: fewer cases, and shorter measurements.
    """
    report, kind = (
        Report(device, how="interpreted" if launch.is_interpreted() else "real", quick=quick),
        device.partition(":")[0],
    )
    report.findings += [*packages(kind), *(cann() if kind == "npu" else ()), *machine(device)]
    if reason := no_device(device):
        report.stopped = f"Nothing was run: {reason}."
        return report
    there = torch.device(device)
    report.device_name = name_of(there)
    report.answers.extend(check_all(there, quick))
    if report.how == "real":
        measure(report, there)
    report.complete = True
    return report
