"""Counts what a compiled kernel does per row that it reads, and per bag or per row that it steps.

A compiled form is followed over batches of two sizes; the difference is what the additional rows, bags or steps take.
What a batch looks like is known by the names of a kernel's parameters. The figures are written to
``row_work.txt`` by ``python -m tests.tools.ascend.row_work``.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from tests.ascend import tools
from tests.ascend.bounds import subject_of
from tests.ascend.cases import ON_ASCEND
from tests.ascend.hivm import compile_to_hivm
from tests.ascend.kernel_case import KernelCase
from tests.ascend.lower import LoweringError, lower
from tests.tools.ascend.chip_model import Assumptions
from tests.tools.ascend.hivm_program import Core, Vector, program_of
from tests.tools.ascend.per_row import FIGURES, FILE, Form, FormWork, RowWork
from tests.tools.ascend.vector_core import ModelledCore

Program = Callable[[Core, Sequence[Any]], None]

_DIGIT = 14
"""Bits: no batch has as many copies, vectors or waits one after the other."""
IN_SERIES = Assumptions(
    "in series", copy=1.0, copy_issue=2.0**-_DIGIT, vector=2.0 ** (-2 * _DIGIT), wait=2.0 ** (-3 * _DIGIT), load=0.0,
    line=0.0, operation=0.0, division=0.0, piece=0.0, core_bandwidth=inf, memory_bandwidth=inf, launch=0.0,
)  # fmt: skip
"""A time in digits: how many copies, beginnings of copies, vectors and waits follow one another until all is done."""
_SMALLEST_BLOCK = 64
"""Columns. Narrower blocks do the same per row."""
IDS_PER_BAG = 10
"""Of the bags that are counted as such: as in the README's workload."""
_TABLES = 2
_ROWS = 100_000
_DTYPES = {"fp32": "f32", "fp16": "f16"}
_FLAGS = {"WEIGHTED": "weighted", "MEAN": "mean", "DECAYS": "decays"}
_HEADER = """\
# What kernels that read rows of tables do per row, and beyond their rows per bag of ten ids or per row that is stepped:
# counted in what Ascend's compilers make of each form for rows as wide as the block, with every id present. What the
# columns mean is in per_row.py. Nothing was run on a chip. Written by `python -m tests.tools.ascend.row_work`.
"""
_Batch = tuple[int, int, bool]
"""Bags, ids per bag, and whether each id is of a row of its own."""


def form_of(case: KernelCase) -> Form | None:
    """What the figures of a case are listed under; None if it reads no rows of tables, or in narrow blocks, or fewer at
    once than fit.
    """
    subject = subject_of(case)
    has_rows = "rows_ptr" in case.signature or "gradients_ptr" in case.signature
    if not has_rows or subject.block < _SMALLEST_BLOCK or case.fewer_rows:
        return None
    flags = [text for name, text in _FLAGS.items() if case.constexprs.get(name)]
    flags += ["half"] if case.signature.get("pooled_ptr") == "*fp16" else []
    return Form(subject.kernel, subject.rule, subject.elements, subject.block, "+".join(flags))


def count(hivm: str, case: KernelCase, compiler: str) -> FormWork:
    """Count what one compilation does.

    Raises:
        UnknownOperation: the text cannot be followed.
        KeyError: the kernel has a parameter that no batch has.
    """
    program = program_of(hivm)
    if "keys_ptr" in case.signature:
        row = _between(program, case, (2, 64, False), (2, 128, False), 128)
        stepped = _between(program, case, (2, 64, True), (2, 128, True), 128)
        return FormWork(compiler, row, stepped.plus(row, -1))
    row = _between(program, case, (2, 128, True), (2, 256, True), 256)
    bag = _between(program, case, (16, IDS_PER_BAG, True), (48, IDS_PER_BAG, True), 32)
    return FormWork(compiler, row, bag.plus(row, -IDS_PER_BAG))


def follow(program: Program, case: KernelCase, batch: _Batch, assumed: Assumptions) -> ModelledCore:
    """One core that does all of a batch."""
    block = case.constexprs["BLOCK_D"]
    values, numbers = _values(batch, block)
    arguments: list[Any] = []
    for name, kind in case.signature.items():
        if kind.startswith("*"):
            arguments.append(Vector(name, _DTYPES.get(kind[1:], kind[1:]), 0, ()))
        else:
            arguments.append(1.0 if kind.startswith("fp") else numbers[name])
    core = ModelledCore(values, assumed)
    program(core, [*arguments, 1, 1, 1])
    return core


def _values(batch: _Batch, block: int) -> tuple[dict[str, list[int]], dict[str, int]]:
    bags, per_bag, each_its_own = batch
    draw, positions, batch_size = random.Random(0), bags * per_bag, max(1, bags // _TABLES)
    features = [min(_TABLES - 1, position * _TABLES // positions) for position in range(positions)]
    starts = [number * _ROWS * block for number in range(_TABLES)]
    values = {
        "rows_ptr": [draw.randrange(_ROWS) for _ in range(positions)],
        "offsets_ptr": list(range(0, positions + 1, per_bag)),
        "lengths_ptr": [per_bag] * bags,
        "keys_ptr": list(range(positions)) if each_its_own else [0] * positions,
        "bags_ptr": [feature * batch_size + draw.randrange(batch_size) for feature in features],
        "tables_ptr": list(range(_TABLES)),
        "borders_ptr": [number * positions // _TABLES for number in range(_TABLES + 1)],
        "row_starts_ptr": [0, features.index(_TABLES - 1)],
        "dims_ptr": [block] * _TABLES,
        "first_columns_ptr": [number * block for number in range(_TABLES + 1)],
        "row_bytes_ptr": [block + 4] * _TABLES,
        **dict.fromkeys(("table_starts_ptr", "weight_starts_ptr", "first_starts_ptr", "second_starts_ptr"), starts),
    }
    numbers = {"num_bags": bags, "batch_size": batch_size, "num_columns": _TABLES * block, "num_positions": positions}
    numbers |= {"num_rows": positions, "num_features": _TABLES, "dim": block}
    return values, numbers


def _between(program: Program, case: KernelCase, small: _Batch, large: _Batch, more: int) -> RowWork:
    """What the larger batch takes beyond the smaller one, divided by how much more it has."""
    figures = [_figures(follow(program, case, batch, IN_SERIES)) for batch in (small, large)]
    return RowWork(*((figures[1][name] - figures[0][name]) / more for name in FIGURES))


def _figures(core: ModelledCore) -> dict[str, int]:
    digits = int(core.seconds * 2.0 ** (3 * _DIGIT))
    figures = {name: core.counts[name] for name in FIGURES}
    for name in ("waited", "chained", "queued"):
        digits, figures[name] = divmod(digits, 2**_DIGIT)
    return figures | {"series": digits}


def count_all(cases: Iterable[KernelCase]) -> dict[Form, list[FormWork]]:
    """What each of these cases does that reads rows of tables, with each version of the compiler."""
    counted = [(case, form) for case in cases if (form := form_of(case)) is not None]
    answers = lower([case for case, _ in counted], tools.triton_ascend_folder())
    works: dict[Form, list[FormWork]] = {}
    for case, form in counted:
        answer = answers[case.name]
        if isinstance(answer, LoweringError):
            raise answer
        for version in tools.ASCENDNPU_IR:
            hivm = compile_to_hivm(answer.linalg, tools.bishengir_compile(version)).hivm
            works.setdefault(form, []).append(count(hivm, case, version))
        print(case, flush=True)
    return works


def write(works: Mapping[Form, Sequence[FormWork]]) -> None:
    """Commit to these figures."""
    names = f"# {'kernel':<32} {'rule':<16} {'elements':<8} {'block':>5} {'form':<21} {'with':<6} {'per':<4}"
    lines = [names + "".join(f"{name:>11}" for name in FIGURES)]
    for form in sorted(works):
        other = "step" if form.rule else "bag"
        for work in works[form]:
            for per, amounts in (("row", work.row), (other, work.more)):
                line = f"{form.kernel:<34} {form.rule or '-':<16} {form.elements:<8} {form.block:>5}"
                line += f" {form.flags or '-':<21} {work.compiler:<6} {per:<4}"
                figures = (f"{round(figure, 4) + 0.0:>11g}" for figure in vars(amounts).values())
                lines.append(line + "".join(figures))
    FILE.write_text(_HEADER + "\n".join(lines) + "\n")


def misfit(compiled: FormWork, known: FormWork) -> str:
    """Which figures of a compiled form are not what was committed; ``""``: all are."""
    wrong = []
    for per, here, there in (("row", compiled.row, known.row), ("bag or step", compiled.more, known.more)):
        for name in FIGURES:
            figure, committed = getattr(here, name), getattr(there, name)
            if abs(figure - committed) > 0.02 * abs(committed) + 0.001:
                wrong.append(f"{figure:g} {name} per {per}, not {committed:g}")
    return "; ".join(wrong)


if __name__ == "__main__":
    write(count_all(ON_ASCEND))
