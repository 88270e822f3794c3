"""Runs every kernel that can be run here, and compares it with its reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from recfx.doctor.answer import Answer
from recfx.doctor.attempt import Failure, attempt
from recfx.doctor.device_checks import device_checks
from recfx.doctor.host_checks import host_checks
from recfx.doctor.kernel_check import KernelCheck, Shape
from recfx.kernels.build import launch, library


def kernels_here(device: torch.device) -> Iterator[tuple[str, Callable[[bool], Answer]]]:
    """The kernels that can be run: each with its name, and what runs it; the argument says whether few shapes do."""
    if library.load():
        for check in host_checks():
            yield f"{check.name} (host)", partial(answer_of, check, torch.device("cpu"), "host")
    if not launch.why_not(device):
        for check in device_checks():
            yield check.name, partial(answer_of, check, device, "device")


def answer_of(check: KernelCheck, device: torch.device, where: str, quick: bool) -> Answer:
    """Run one kernel on all its shapes."""
    begin = time.perf_counter()
    shapes = list(check.shapes(quick))
    wrong = [(shape, failure) for shape in shapes if (failure := _wrong(check, shape, device))]
    shape, failure = wrong[0] if wrong else (None, attempt(partial(check.opcheck, shapes[0], device, quick)))
    if failure is not None and shape is None:
        failure = Failure(f"opcheck: {failure.message}", failure.traceback)
    return Answer(
        check.name,
        where,
        len(shapes),
        len(wrong),
        "" if shape is None else shape.text,
        "" if failure is None else failure.message,
        "" if failure is None else failure.traceback,
        time.perf_counter() - begin,
    )


def _wrong(check: KernelCheck, shape: Shape, device: torch.device) -> Failure | None:
    mismatches: list[str] = []
    raised = attempt(lambda: mismatches.append(check.mismatch(shape, device)))
    return raised or (Failure(mismatches[0], "") if mismatches[0] else None)
