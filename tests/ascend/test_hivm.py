"""Level 4: BiSheng's compiler takes the kernels, they fit into the unified buffer, and vectors stay vectors."""

import re
import subprocess
from dataclasses import replace

import pytest

from recfx.kernels.build.tiling import CHIPS, step_rows
from tests.ascend import bounds, tools
from tests.ascend.bounds import misfit, subject_of
from tests.ascend.cases import BY_NAME, ON_ASCEND
from tests.ascend.hivm import CompileError, hivm_of
from tests.ascend.lower import Lowered, lower
from tests.ascend.lowered import compiled, lowered

each_version = pytest.mark.parametrize("version", tools.ASCENDNPU_IR)


@each_version
@pytest.mark.parametrize("name", [case.name for case in ON_ASCEND])
def test_compiles_and_fits_as_the_bounds_say(name: str, version: str) -> None:
    measured = bounds.bound_of(compiled(name, version))
    assert measured.ub_bytes
    assert measured.lane_loops == 0
    bound = bounds.read()[subject_of(BY_NAME[name])][version]
    if BY_NAME[name].fewer_rows:
        assert measured.ub_bytes <= bound.ub_bytes
        return
    assert misfit(measured, bound) == "", f"`{bounds.COMMAND}` measures the bounds again"


KNOWN = [(chip, version) for chip in sorted(CHIPS) for version in tools.ASCENDNPU_IR[CHIPS[chip].is_950 :]]


@pytest.mark.parametrize(("chip", "version"), KNOWN)
def test_chips_are_as_the_compiler_knows_them(chip: str, version: str) -> None:
    tools.ascendnpu_ir(version).require()
    known, program = CHIPS[chip], tools.bishengir_opt(version, CHIPS[chip].is_950)
    done = subprocess.run(
        [program, "-", f"--hacc-append-device-spec=target={chip}"],
        input="module {}", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    facts = {name: int(value) for name, value in re.findall(r'dl_entry<"(\w+)", (-?\d+) : i32>', done.stdout)}
    assert facts["VECTOR_CORE_COUNT"] == known.vector_cores
    assert facts["UB_SIZE"] == 8 * known.ub_bytes
    assert facts["UB_ALIGN_SIZE"] == 8 * known.ub_alignment_bytes


@pytest.mark.parametrize("kernel", sorted({case.kernel for case in ON_ASCEND}))
def test_the_950_generation_takes_the_largest_blocks(kernel: str) -> None:
    """The needs were measured for the 910 generation; here it is shown that nothing overflows on this one."""
    case = max((case for case in ON_ASCEND if case.kernel == kernel), key=lambda case: subject_of(case).block)
    linalg = lowered(case.name).linalg
    version = tools.ASCENDNPU_IR[-1]
    tools.ascendnpu_ir(version).require()
    compiler = tools.bishengir_compile(version).with_name("bishengir-compile-a5")
    assert "hivm.hir" in hivm_of(linalg, compiler, "Ascend910_9589")


def test_the_950_generation_takes_steps_of_two_rows() -> None:
    """With eight its compiler fails for Adam with weight decay in float32; ``step_rows`` says so."""
    tools.triton_ascend().require()
    version = tools.ASCENDNPU_IR[-1]
    tools.ascendnpu_ir(version).require()
    compiler = tools.bishengir_compile(version).with_name("bishengir-compile-a5")
    chip = CHIPS["Ascend910_9589"]
    step = BY_NAME["fused_step-adam-fp32-block_64-weighted"]
    steps = {rows: replace(step, name=str(rows), constexprs={**step.constexprs, "ROWS": rows}) for rows in (2, 8)}
    answers = lower(steps.values(), tools.triton_ascend_folder())
    texts = {rows: answer.linalg for rows in steps if isinstance(answer := answers[str(rows)], Lowered)}
    assert "hivm.hir" in hivm_of(texts[step_rows(64, chip)], compiler, chip.name)
    with pytest.raises(CompileError):
        hivm_of(texts[step_rows(64)], compiler, chip.name)
