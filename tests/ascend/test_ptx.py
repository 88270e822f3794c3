"""The same source compiles for an NVIDIA GPU; no GPU is needed, and none is used."""

from __future__ import annotations

import pytest

from tests.ascend import tools
from tests.ascend.cases import BY_NAME, CASES
from tests.ascend.kernel_case import function_at, resolved


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_compiles_to_ptx_and_cubin(name: str) -> None:
    tools.triton().require()
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    case = BY_NAME[name]
    kernel = function_at(case.kernel)
    signature = {parameter: case.signature.get(parameter, "constexpr") for parameter in kernel.arg_names}
    constants = {(kernel.arg_names.index(parameter),): value for parameter, value in resolved(case.constexprs).items()}
    compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    assert ".visible .entry recfx_" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 1000
