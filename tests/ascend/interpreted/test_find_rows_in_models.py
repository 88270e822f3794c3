"""Collections on target ``triton`` whose rows the kernel finds, in the interpreter: in eval mode, and in training."""

from __future__ import annotations

import pytest

from tests.ascend import finding_on_device, inserting_on_device
from tests.ascend.finding_on_device import Place


@pytest.mark.parametrize("case", finding_on_device.CASES)
def test_as_on_the_host(case: str) -> None:
    finding_on_device.CASES[case](Place("cpu", "triton"))


@pytest.mark.parametrize("case", inserting_on_device.CASES)
def test_trains_as_on_the_host(case: str) -> None:
    inserting_on_device.CASES[case](Place("cpu", "triton"))
