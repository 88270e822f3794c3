"""The tiling tables of ``recfx.kernels.build.tiling`` against what Ascend's compiler needs, and against themselves."""

from dataclasses import replace
from functools import cache

import pytest

from recfx.kernels.build.tiling import ASCEND_910B, NEEDS
from recfx.optim.fused_step_op import rules_in_triton
from tests.ascend import bounds, tools
from tests.ascend.bounds import BLOCKS, Subject, forms, most, needed, refused, subject_of
from tests.ascend.cases import ON_ASCEND
from tests.ascend.kernel_case import KernelCase
from tests.ascend.lower import Lowered, lower

BOUNDS = bounds.read()
ACROSS_ROWS = sorted({(subject.kernel, subject.rule) for subject in BOUNDS if subject.block})
LARGEST_SERVED = 1024
"""Columns that every kernel serves."""


def test_every_kernel_was_measured_and_has_a_need() -> None:
    tested = {subject_of(case) for case in ON_ASCEND}
    assert tested - set(BOUNDS) == set(), f"`{bounds.COMMAND} --only PART_OF_A_NAME` measures new kernels"
    assert {subject.kernel for subject in BOUNDS} == {subject.kernel for subject in tested}
    sizes: dict[tuple[str, str], set[int]] = {}
    for subject in BOUNDS:
        sizes.setdefault((subject.kernel, subject.rule), set()).add(subject.element_bytes)
    of_steps = [("recfx_fused_step", rule.name) for rule in rules_in_triton()]
    of_steps += [("recfx_fused_step_of_borders", rule.name) for rule in rules_in_triton()]
    known = {(name, ""): set(of_sizes) for name, of_sizes in NEEDS.items()}
    assert sizes == known | {of_step: {2, 4} for of_step in of_steps}
    assert all(rule.needs for rule in rules_in_triton())


def test_needs_cover_everything_that_was_measured() -> None:
    assert bounds.uncovered(BOUNDS) == []


def test_rows_of_1024_columns_are_served() -> None:
    assert not [subject for subject in BOUNDS if subject.block <= LARGEST_SERVED and refused(subject)]


@pytest.mark.parametrize(("kernel", "rule"), ACROSS_ROWS)
def test_needs_are_not_much_too_large(kernel: str, rule: str) -> None:
    """At 1,024 columns, where the size of the buffer begins to matter, and in what is refused."""
    of_kernel = [subject for subject in BOUNDS if (subject.kernel, subject.rule) == (kernel, rule)]
    at_1024 = [subject for subject in of_kernel if subject.block == LARGEST_SERVED]
    assert max(map(needed, at_1024)) <= 1.1 * max(most(BOUNDS[subject]).ub_bytes or 0 for subject in at_1024)
    for subject in filter(refused, of_kernel):
        ub_bytes = [bound.ub_bytes for bound in BOUNDS[subject].values()]
        assert None in ub_bytes or max(filter(None, ub_bytes)) >= 0.75 * ASCEND_910B.ub_bytes


@pytest.mark.parametrize(("kernel", "rule"), ACROSS_ROWS)
def test_what_overflows_is_refused(kernel: str, rule: str) -> None:
    """And where nothing overflows, nothing is."""
    of_kernel = [subject for subject in BOUNDS if (subject.kernel, subject.rule) == (kernel, rule)]
    overflowing = [subject for subject in of_kernel if most(BOUNDS[subject]).ub_bytes is None]
    assert all(map(refused, overflowing))
    assert overflowing or not any(map(refused, of_kernel))


def of_one_dtype(kernel: str, rule: str) -> list[KernelCase]:
    of_kernel = [case for case in ON_ASCEND if (subject_of(case).kernel, subject_of(case).rule) == (kernel, rule)]
    elements = subject_of(of_kernel[0]).elements
    return [case for case in of_kernel if subject_of(case).elements == elements]


def first_overflowing(series: Subject, version: str) -> int | None:
    """The block that the bounds give; None: no block of them overflows with this version."""
    blocks = [
        subject.block
        for subject, of_versions in BOUNDS.items()
        if replace(subject, block=series.block) == series and of_versions[version].ub_bytes is None
    ]
    return min(blocks, default=None)


@cache
def lowered() -> dict[Subject, list[str]]:
    """Each kernel and rule, in all forms of one dtype: the largest block that is accepted, and those that overflow."""
    asked: list[KernelCase] = []
    for kernel, rule in ACROSS_ROWS:
        cases = of_one_dtype(kernel, rule)
        series = subject_of(cases[0])
        blocks = {first_overflowing(series, version) for version in tools.ASCENDNPU_IR}
        blocks.add(max(block for block in BLOCKS if not refused(replace(series, block=block))))
        asked += [form for form in forms(cases) if subject_of(form).block in blocks]
    answers = lower(asked, tools.triton_ascend_folder())
    texts: dict[Subject, list[str]] = {}
    for form in asked:
        answer = answers[form.name]
        assert isinstance(answer, Lowered), answer
        texts.setdefault(subject_of(form), []).append(answer.linalg)
    return texts


@pytest.mark.parametrize("version", tools.ASCENDNPU_IR)
@pytest.mark.parametrize(("kernel", "rule"), ACROSS_ROWS)
def test_refusals_agree_with_the_compiler(kernel: str, rule: str, version: str) -> None:
    """The largest block that is accepted fits in every form; the first that overflows was refused before."""
    tools.triton_ascend().require()
    tools.ascendnpu_ir(version).require()
    series = subject_of(of_one_dtype(kernel, rule)[0])
    accepted = {
        subject: texts for subject, texts in lowered().items() if replace(subject, block=series.block) == series
    }
    fitting = max(subject for subject in accepted if not refused(subject))
    assert None not in [bounds.compiled_once(text, version).ub_bytes for text in accepted[fitting]]
    overflowing = first_overflowing(series, version)
    if overflowing is not None:
        subject = replace(series, block=overflowing)
        assert any(bounds.compiled_once(text, version).ub_bytes is None for text in reversed(accepted[subject]))
        assert refused(subject)
