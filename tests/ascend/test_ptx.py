"""The same source compiles for an NVIDIA GPU; no GPU is needed, and none is used."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.ascend import tools
from tests.ascend.cases import BY_NAME, CASES
from tests.ascend.kernel_case import KernelCase, function_at, resolved


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_compiles_to_ptx_and_cubin(name: str) -> None:
    compiled = _compiled(BY_NAME[name], ones=())
    assert ".visible .entry recfx_" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 1000


@pytest.mark.parametrize("name", {case.kernel: case.name for case in CASES}.values())
def test_compiles_where_a_number_is_one(name: str) -> None:
    """Triton makes integers of 1 constants of a form of their own: a batch of one sample, a table of one column."""
    numbers = [parameter for parameter, type_name in BY_NAME[name].signature.items() if type_name == "i32"]
    for ones in (numbers, *([number] for number in numbers)):
        assert ".visible .entry recfx_" in _compiled(BY_NAME[name], ones).asm["ptx"]


def _compiled(case: KernelCase, ones: Sequence[str]) -> Any:
    tools.triton().require()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = function_at(case.kernel)
    constants = {**resolved(case.constexprs), **dict.fromkeys(ones, 1)}
    types = {name: "constexpr" if name in constants else case.signature[name] for name in kernel.arg_names}
    by_position = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(ASTSource(kernel, types, by_position), target=GPUTarget("cuda", 90, 32))
