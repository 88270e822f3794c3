"""Each level notices a kernel that is wrong in the way that this level is there for."""

import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from recfx.kernels.build import tiling
from recfx.kernels.build.tiling import ASCEND_910B, refusal
from recfx.optim.rules.adam import ADAM
from tests.ascend import bounds, tools, written_then_read
from tests.ascend.bounds import Bound, misfit
from tests.ascend.cases import ON_ASCEND as EVERY_CASE
from tests.ascend.guard_pages import guarded, signal_of
from tests.ascend.hivm import UnifiedBufferOverflow, compile_to_hivm
from tests.ascend.interpreter import interpreter
from tests.ascend.kernel_case import Call, KernelCase, Place, assert_answered, function_at, resolved
from tests.ascend.linalg_on_cpu import LinalgOnCpu
from tests.ascend.lint import lint
from tests.ascend.lower import Lowered, lower

DIM = 48
SIGNATURE = {"rows_ptr": "*i64", "table_ptr": "*fp32", "sums_ptr": "*fp32", "num_rows": "i32", "dim": "i32"}


def call(place: Place) -> Call:
    """A sum whose value depends on the order, up to the last row of the table."""
    draw = torch.Generator().manual_seed(0)
    table, rows = torch.randn(9, DIM, generator=draw), torch.tensor([8, 0, 3, 5, 8, 1, 8])
    expected = torch.zeros(DIM)
    for row in rows.tolist():
        expected = expected + table[row]
    return Call([place(rows), place(table), place(torch.zeros(DIM)), len(rows), DIM], {"sums_ptr": expected})


def call_with_codes(place: Place) -> Call:
    """A sum of bytes, of which half are above 127."""
    codes = torch.arange(9 * DIM, dtype=torch.int64) * 7 % 256
    table, rows = codes.to(torch.uint8).view(9, DIM), torch.tensor([8, 0, 3])
    expected = table[rows].float().sum(0)
    arguments = [place(rows), place(table).view(torch.int8), place(torch.zeros(DIM)), len(rows), DIM]
    return Call(arguments, {"sums_ptr": expected})


def wrong(name: str, block: int = 64, build: Callable[[Place], Call] = call, table: str = "*fp32") -> KernelCase:
    kernel = f"tests.tools.ascend.wrong_kernels:recfx_wrong_{name}"
    return KernelCase(name, kernel, SIGNATURE | {"table_ptr": table}, {"BLOCK_D": block}, {"sum": build}, programs=1)


CASES = {
    case.name: case
    for case in (
        wrong("reads_one_more"),
        wrong("has_no_mask"),
        wrong("sums_backwards"),
        wrong("masks_a_scalar"),
        wrong("reads_what_it_wrote"),
        wrong("takes_codes_as_signed", build=call_with_codes, table="*i8"),
        wrong("needs_many_blocks", 65536),
    )
}


@cache
def lowered() -> dict[str, str]:
    answers = lower(CASES.values(), tools.triton_ascend_folder())
    return {name: answer.linalg for name, answer in answers.items() if isinstance(answer, Lowered)}


def interpret(name: str) -> None:
    case = CASES[name]
    made = case.calls["sum"](torch.clone)
    with written_then_read.refused():
        function_at(case.kernel)[(1,)](*made.arguments, **resolved(case.constexprs))
    assert_answered(case, made)


@pytest.mark.parametrize("name", ["sums_backwards", "takes_codes_as_signed"])
def test_the_interpreter_notices_other_results(name: str) -> None:
    tools.triton().require()
    with pytest.raises(AssertionError, match=f"{name}, sums_ptr: Tensor-likes are not equal"):
        interpreter().run(interpret, name)


def test_the_interpreter_notices_reads_of_what_was_written() -> None:
    tools.triton().require()
    with pytest.raises(AssertionError, match="48 elements are read after the launch has written them"):
        interpreter().run(interpret, "reads_what_it_wrote")


@pytest.mark.parametrize("name", ["sums_backwards", "takes_codes_as_signed"])
def test_linalg_on_the_cpu_notices_other_results(name: str) -> None:
    tools.triton_ascend().require()
    tools.llvm().require()
    case = CASES[name]
    made = case.calls["sum"](torch.clone)
    LinalgOnCpu(lowered()[name]).run(made.arguments, programs=1)
    with pytest.raises(AssertionError, match=f"{name}, sums_ptr: Tensor-likes are not equal"):
        assert_answered(case, made)


@pytest.mark.parametrize("name", ["reads_one_more", "has_no_mask", "masks_a_scalar"])
def test_guard_pages_notice_reads_past_the_end(name: str) -> None:
    tools.triton_ascend().require()
    tools.llvm().require()
    kernel, made = LinalgOnCpu(lowered()[name]), call(guarded("end"))
    assert signal_of(partial(kernel.run, made.arguments, 1)) == signal.SIGSEGV


@pytest.mark.parametrize("version", tools.ASCENDNPU_IR)
def test_the_compiler_notices_an_overflow(version: str) -> None:
    tools.triton_ascend().require()
    tools.ascendnpu_ir(version).require()
    with pytest.raises(UnifiedBufferOverflow, match="bytes of the unified buffer needed, 196608 there"):
        compile_to_hivm(lowered()["needs_many_blocks"], tools.bishengir_compile(version))


@pytest.mark.parametrize("version", tools.ASCENDNPU_IR)
def test_an_overflow_is_refused_before_anything_is_compiled(version: str) -> None:
    """The step with the most states, on rows of 16,384 columns: its tiling table says what the compiler says."""
    tools.triton_ascend().require()
    tools.ascendnpu_ir(version).require()
    step = next(case for case in EVERY_CASE if case.name.startswith("fused_step-adam-fp32"))
    wide = replace(step, constexprs={**step.constexprs, "BLOCK_D": 16384})
    answer = lower([wide], tools.triton_ascend_folder())[wide.name]
    assert isinstance(answer, Lowered)
    with pytest.raises(UnifiedBufferOverflow):
        compile_to_hivm(answer.linalg, tools.bishengir_compile(version))
    refused = refusal(ASCEND_910B, "recfx_fused_step", 16384, 4, ADAM.needs)
    assert refused is not None
    assert "bytes of the unified buffer for rows of 16,384 columns, Ascend910B3 has 196,608." in refused


def test_a_need_that_is_too_small_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pooled lookup that takes half as many vectors: wrong figures, and a block that overflows."""
    name = "recfx_pooled_lookup"
    known = {of: bound for of, bound in bounds.read().items() if (of.kernel, of.elements) == (name, "fp32")}
    assert bounds.uncovered(known) == []
    monkeypatch.setattr(tiling, "NEEDS", {name: {4: tiling.Need(1088, 28, per_lookup_row=4)}})
    assert {64, 1024, 2048} <= {subject.block for subject in bounds.uncovered(known)}


def test_a_kernel_of_unknown_operations_is_refused() -> None:
    """Nobody takes an empty answer for a kernel that was lowered."""
    tools.triton_ascend().require()
    absent = KernelCase("absent", "tests.tools.ascend.wrong_kernels:recfx_wrong_absent", SIGNATURE, {}, {})
    with pytest.raises(RuntimeError, match="has no attribute 'recfx_wrong_absent'"):
        lower([absent], tools.triton_ascend_folder())


def test_a_wrong_bound_is_noticed() -> None:
    """Too tight, too loose, of a kernel that overflows, and of one whose vectors became loops."""
    assert misfit(Bound(3104, 0), Bound(3104, 0)) == ""
    assert "the bound is 3072" in misfit(Bound(3104, 0), Bound(3072, 0))
    assert "much looser: 4704" in misfit(Bound(3104, 0), Bound(4704, 0))
    assert "one overflows" in misfit(Bound(None, 0), Bound(3104, 0))
    assert "1 loops" in misfit(Bound(3104, 1), Bound(3104, 0))


HASHES = {"ids_ptr": "*i32", "hashes_ptr": "*i32", "num_ids": "i32"}
WRONG = {
    "shifts_unsigned": "unsigned_vector",
    "multiplies_high": "multiply_high",
    "trusts_cas": "compare_and_swap",
    "stores_every_other": "discrete_store",
    "hashes_wide": "wide_vector",
    "computes_in_double": "double",
    "carries_a_boolean": "boolean_in_while",
}


def test_every_rule_finds_what_it_is_for() -> None:
    tools.triton_ascend().require()
    kernel = "tests.tools.ascend.wrong_kernels:recfx_wrong_{}"
    cases = [KernelCase(name, kernel.format(name), HASHES, {"BLOCK": 64}, {}) for name in WRONG]
    codes = {
        name: [code for code, _ in lint(answer)]
        for name, answer in lower(cases, tools.triton_ascend_folder()).items()
        if isinstance(answer, Lowered)
    }
    assert codes == {name: [code] for name, code in WRONG.items()}
