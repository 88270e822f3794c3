"""Levels 2 and 3: kernels are lowered to Ascend's linalg, which computes the right thing and touches nothing else."""

import mmap
import signal
from functools import cache

import pytest
import torch

from tests.ascend import tools
from tests.ascend.cases import BY_NAME, ON_ASCEND
from tests.ascend.guard_pages import guarded, signal_of
from tests.ascend.kernel_case import assert_answered
from tests.ascend.linalg_on_cpu import LinalgOnCpu
from tests.ascend.lowered import lowered

each_case = pytest.mark.parametrize("name", [case.name for case in ON_ASCEND])


@cache
def built(name: str) -> LinalgOnCpu:
    """One compiled form, once for all of its tests."""
    linalg = lowered(name).linalg
    tools.llvm().require()
    return LinalgOnCpu(linalg)


@each_case
def test_computes_what_its_reference_does(name: str) -> None:
    """The programs one after another, and four at a time."""
    kernel, case = built(name), BY_NAME[name]
    for build in case.calls.values():
        for threads in (1, 4):
            call = build(torch.clone)
            kernel.run(call.arguments, case.programs, threads)
            assert_answered(case, call)


@each_case
def test_touches_nothing_outside_its_arguments(name: str) -> None:
    """All calls with guard pages at either side, one after another in one process."""
    kernel, case = built(name), BY_NAME[name]
    labels = [(side, label) for side in ("end", "begin") for label in case.calls]
    calls = [case.calls[label](guarded(side)) for side, label in labels]
    begun = mmap.mmap(-1, len(calls))

    def launch() -> None:
        for number, call in enumerate(calls):
            begun[number] = 1
            kernel.run(call.arguments, case.programs)

    ended_by = signal_of(launch)
    side, label = labels[max(sum(begun[:]) - 1, 0)]
    assert ended_by == 0, f"{label}, guarded at the {side}: {signal.Signals(ended_by).name}"
    for call in calls:
        assert_answered(case, call)
