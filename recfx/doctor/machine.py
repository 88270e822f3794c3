"""The device, the Triton that would compile for it, and recfx's library: what is seen from inside of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from recfx.doctor.report import Finding, Status, missing, ok
from recfx.kernels.build import launch, library, packaged, tiling
from recfx.versions.sets import nearest

SIMULATED = "RECFX_SIMULATED_NPUS"
"""Set in processes that see the simulated NPU of ``tests/ascend/npu_runtime``."""


_ADVICE = {
    "cuda": "install a driver, and a torch that was built for CUDA; nvidia-smi shows what the driver sees",
    "npu": "npu-smi info shows what the driver sees; ASCEND_RT_VISIBLE_DEVICES may hide devices",
}


def how(device: str) -> str:
    """How kernels run: ``real``, ``simulated`` (nothing was computed by an NPU) or ``interpreted`` (by Triton)."""
    if device.startswith("npu") and SIMULATED in os.environ:
        return "simulated"
    return "interpreted" if device.startswith("cpu") and launch.is_interpreted() else "real"


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
    """What the driver calls the device."""
    if device.type == "cpu":
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            lines = []
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    return str(torch.get_device_module(device).get_device_name(device))


def machine(device: str) -> Iterator[Finding]:
    """The device, the chip of an NPU, Triton and the library."""
    if reason := no_device(device):
        yield missing("device", reason, _ADVICE[device.partition(":")[0]])
    else:
        there = torch.device(device)
        yield ok("device", f"{name_of(there)}; torch uses {torch.get_num_threads()} of {os.cpu_count()} logical cores")
        yield from _chip(there)
        yield _triton(there)
    yield _library()


def _chip(device: torch.device) -> Iterator[Finding]:
    """The limits that kernels are cut for, of an NPU."""
    if device.type != "npu":
        return
    try:
        chip = tiling.chip_named(name_of(device))
    except ValueError as error:
        yield missing("limits of the chip", str(error), "send this report along: it has the chip's name")
        return
    yield ok("limits of the chip", f"{chip.vector_cores} vector cores, {chip.ub_bytes:,} bytes of unified buffer each")


def _triton(device: torch.device) -> Finding:
    if device.type == "cpu" and not launch.is_interpreted():
        return ok("Triton", "not used on the CPU, where kernels are in C++")
    if reason := launch.why_not(device):
        fit = nearest(torch.__version__)
        package = f"triton-ascend=={fit.triton_ascend}" if device.type == "npu" else f"triton=={fit.triton}"
        return missing("Triton", reason.rstrip("."), f"pip uninstall triton triton-ascend; pip install {package}")
    return ok("Triton", "in its interpreter" if launch.is_interpreted() else "runs here")


def _library() -> Finding:
    """Loads the library; if none came with recfx, that compiles it the first time."""
    name = "recfx's library"
    if not library.load():
        return missing(name, f"not loaded: {library.why_not()}", "python -m recfx.kernels shows what is wrong")
    path = library.loaded_path()
    try:
        folder = library.build_directory()
        why = f"{folder} cannot be used"
    except FileNotFoundError as error:
        folder, why = None, str(error)
    if path is None or path.parent in (folder, packaged.LIBRARIES):
        return ok(name, f"{path}")
    advice = "set RECFX_BUILD_DIR to a directory of your own that nobody else can write to"
    return Finding(name, Status.WARNING, f"compiled for this process alone: {why}", advice)
