"""Collections on target ``triton`` in eval mode: their rows are found by the kernel, in the interpreter."""

from __future__ import annotations

import pytest

from tests.ascend.finding_on_device import CASES, Place


@pytest.mark.parametrize("case", CASES)
def test_as_on_the_host(case: str) -> None:
    CASES[case](Place("cpu", "triton"))
