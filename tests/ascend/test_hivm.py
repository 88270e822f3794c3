"""Level 4: BiSheng's compiler takes the kernels, they fit into the unified buffer, and vectors stay vectors."""

from __future__ import annotations

import pytest

from tests.ascend import tools
from tests.ascend.cases import CASES
from tests.ascend.hivm import compile_to_hivm
from tests.ascend.lowered import lowered

UB_BYTES = 192 * 1024


@pytest.mark.parametrize("version", tools.ASCENDNPU_IR)
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_compiles_and_fits(name: str, version: str) -> None:
    linalg = lowered(name).linalg
    tools.ascendnpu_ir(version).require()
    compiled = compile_to_hivm(linalg, tools.bishengir_compile(version))
    assert 0 < compiled.ub_bytes <= UB_BYTES
    assert compiled.lane_loops == ()
