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
from recfx.doctor.kernel_check import KernelCheck
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
    failures = [(shape.text, attempt(partial(check.mismatch, shape, device))) for shape in shapes]
    wrong = [(text, failure) for text, failure in failures if failure.message]
    smallest, failure = wrong[0] if wrong else ("", attempt(partial(check.opcheck, shapes[0], device, quick)))
    if failure.message and not wrong:
        failure = Failure(f"opcheck: {failure.message}", failure.traceback)
    seconds = time.perf_counter() - begin
    return Answer(check.name, where, len(shapes), len(wrong), smallest, failure.message, failure.traceback, seconds)
