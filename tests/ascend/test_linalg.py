"""Levels 2 and 3: kernels are lowered to Ascend's linalg, which computes the right thing and touches nothing else."""

from __future__ import annotations

import mmap
import signal

import pytest
import torch

from tests.ascend import tools
from tests.ascend.cases import BY_NAME, CASES
from tests.ascend.guard_pages import guarded, signal_of
from tests.ascend.kernel_case import Call, KernelCase, assert_answered
from tests.ascend.linalg_on_cpu import LinalgOnCpu
from tests.ascend.lowered import lowered

each_case = pytest.mark.parametrize("name", [case.name for case in CASES])


@each_case
def test_computes_what_its_reference_does(name: str) -> None:
    """The programs one after another, and four at a time."""
    linalg, case = lowered(name).linalg, BY_NAME[name]
    tools.llvm().require()
    kernel = LinalgOnCpu(linalg, optimized=True)
    for build in case.calls.values():
        for threads in (1, 4):
            call = build(torch.clone)
            kernel.run(call.arguments, case.programs, threads)
            assert_answered(case, call)


@each_case
def test_touches_nothing_outside_its_arguments(name: str) -> None:
    linalg, case = lowered(name).linalg, BY_NAME[name]
    tools.llvm().require()
    kernel = LinalgOnCpu(linalg, optimized=False)
    for side in ("end", "begin"):
        for call in _launch_guarded(kernel, case, side):
            assert_answered(case, call)


def _launch_guarded(kernel: LinalgOnCpu, case: KernelCase, side: str) -> list[Call]:
    """All calls of a case, one after another in one process."""
    calls = [build(guarded(side)) for build in case.calls.values()]
    begun = mmap.mmap(-1, len(calls))

    def launch() -> None:
        for number, call in enumerate(calls):
            begun[number] = 1
            kernel.run(call.arguments, case.programs)

    ended_by = signal_of(launch)
    label = [*case.calls][max(sum(begun[:]) - 1, 0)]
    assert ended_by == 0, f"{label}, guarded at the {side}: {signal.Signals(ended_by).name}"
    return calls
