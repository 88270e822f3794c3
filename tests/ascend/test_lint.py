"""No kernel uses what Ascend's tool chain is known to get wrong; every rule is seen to find what it is for."""

from __future__ import annotations

import pytest

from tests.ascend import tools
from tests.ascend.cases import CASES
from tests.ascend.kernel_case import KernelCase
from tests.ascend.lint import lint
from tests.ascend.lower import Lowered, lower
from tests.ascend.lowered import lowered

SIGNATURE = {"ids_ptr": "*i32", "hashes_ptr": "*i32", "num_ids": "i32"}
WRONG = {
    "shifts_unsigned": "unsigned_vector",
    "multiplies_high": "multiply_high",
    "trusts_cas": "compare_and_swap",
    "stores_every_other": "discrete_store",
    "hashes_wide": "wide_vector",
    "computes_in_double": "double",
    "carries_a_boolean": "boolean_in_while",
}


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_no_kernel_uses_what_goes_wrong(name: str) -> None:
    assert list(lint(lowered(name))) == []


def test_every_rule_finds_what_it_is_for() -> None:
    tools.triton_ascend().require()
    kernel = "tests.ascend.wrong_kernels:recfx_wrong_{}"
    cases = [KernelCase(name, kernel.format(name), SIGNATURE, {"BLOCK": 64}, {}) for name in WRONG]
    codes = {
        name: [code for code, _ in lint(answer)]
        for name, answer in lower(cases, tools.triton_ascend_folder()).items()
        if isinstance(answer, Lowered)
    }
    assert codes == {name: [code] for name, code in WRONG.items()}
