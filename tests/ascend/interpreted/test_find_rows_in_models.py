"""Collections on target ``triton`` whose rows the kernel finds, in the interpreter."""

import pytest

from tests.ascend import finding_on_device
from tests.ascend.finding_on_device import Place


@pytest.mark.parametrize("case", finding_on_device.CASES)
def test_as_on_the_host(case: str) -> None:
    finding_on_device.CASES[case](Place("cpu", "triton"))
