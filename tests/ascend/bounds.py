"""How much of the unified buffer compiled kernels take, as bounds: one version of the compiler is not deterministic.

``python -m tests.ascend.bounds`` measures every kernel in all of its forms and writes ``bounds.txt``: some minutes.
``--only PART`` measures the kernels whose names contain a part, and keeps what is known of the others.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from pathlib import Path

from recfx.kernels.build.tiling import ASCEND_910B, SMALLEST_BLOCK, RuleNeeds, lookup_rows, refusal, step_rows, ub_bytes
from recfx.optim.rules import RULES
from tests.ascend import tools
from tests.ascend.hivm import Compiled, UnifiedBufferOverflow, compile_to_hivm
from tests.ascend.kernel_case import KernelCase
from tests.ascend.lower import LoweringError, lower

FILE = Path(__file__).with_name("bounds.txt")
COMMAND = "python -m tests.ascend.bounds"
BLOCKS = tuple(SMALLEST_BLOCK << power for power in range(11))
"""Up to 16,384 columns: every kernel that works on blocks overflows before the last."""
_FLAGS = ("WEIGHTED", "MEAN", "DECAYS")
_WIDEST = {"recfx_quantized_lookup": 1024}
"""Columns up to which a kernel is measured: where it does not fit, one version of the compiler looks for minutes."""
_BLOCK_OF = ("BLOCK_D", "BLOCK_W")
"""What blocks are called: of columns, and of the pieces that ids are routed to."""
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "i64": 8, "i32": 4, "i8": 1, "int8": 1, "int4": 1}
_MORE = 1
"""A form is compiled until so many compilations in a row have needed no more than those before."""
_LOOSEST = 1.5
"""A bound is at most so many times what a compilation needs, and one unit: forms differ, but not by more."""
_UNIT = ASCEND_910B.ub_alignment_bytes
_HEADER = f"""\
# The unified buffer that compiled kernels take, as bounds: the most bytes that were seen over all forms (weighted or
# not, sum or mean, with weight decay or without) and several compilations of each, rounded up to {_UNIT}; and how many
# loops go through a vector element by element. "overflow": at least one form did not fit; larger blocks were not tried.
# Compiled for {ASCEND_910B.name}, never run there. Written by `{COMMAND}`.
"""


@dataclass(frozen=True, order=True)
class Subject:
    """What a bound is for.

    Args:
        kernel: the Triton function.
        rule: of an optimizer; ``""``: none.
        elements: the type of the tables' elements, or of the ids.
        block: columns; 0: a kernel without blocks.
    """

    kernel: str
    rule: str
    elements: str
    block: int

    @property
    def element_bytes(self) -> int:
        return _BYTES[self.elements]

    @property
    def needs(self) -> RuleNeeds | None:
        """What the rule says that it needs."""
        return next((rule.needs for rule in RULES if rule.name == self.rule), None)


@dataclass(frozen=True)
class Bound:
    """What one version of the compiler needs at most; ``ub_bytes`` of None: more than there is."""

    ub_bytes: int | None
    lane_loops: int

    def __or__(self, other: Bound) -> Bound:
        """That which covers both."""
        overflow = self.ub_bytes is None or other.ub_bytes is None
        most = None if overflow else max(self.ub_bytes or 0, other.ub_bytes or 0)
        return Bound(most, max(self.lane_loops, other.lane_loops))


Bounds = Mapping[Subject, Mapping[str, Bound]]
"""By version of ascendnpu-ir."""


def subject_of(case: KernelCase) -> Subject:
    """Which bound a compiled form comes under."""
    step = str(case.constexprs.get("STEP", ""))
    rule = step.partition(":")[0].rpartition(".")[2].removesuffix("_triton")
    pointers = [dtype for dtype in case.signature.values() if dtype.startswith("*")]
    elements = case.signature.get("weights_ptr", pointers[0]).removeprefix("*")
    if "BITS" in case.constexprs:
        elements = f"int{case.constexprs['BITS']}"
    block = next((case.constexprs[name] for name in _BLOCK_OF if name in case.constexprs), 0)
    return Subject(case.kernel.partition(":")[2], rule, elements, block)


def read() -> Bounds:
    """The committed bounds."""
    bounds: dict[Subject, dict[str, Bound]] = {}
    for line in FILE.read_text().splitlines():
        if line.startswith("#") or not line:
            continue
        kernel, rule, elements, block, *cells = line.split()
        subject = Subject(kernel, rule.strip("-"), elements, int(block.replace("-", "0")))
        of_versions = zip(tools.ASCENDNPU_IR, cells[::2], cells[1::2], strict=True)
        bounds[subject] = {
            version: Bound(None if ub_bytes == "overflow" else int(ub_bytes), int(loops.replace("-", "0")))
            for version, ub_bytes, loops in of_versions
        }
    return bounds


def write(bounds: Bounds) -> None:
    """Commit to bounds."""
    columns = "".join(f"{'ub ' + version:>11} {'loops':>5}" for version in tools.ASCENDNPU_IR)
    lines = [f"# {'kernel':<32} {'rule':<16} {'elements':<8} {'block':>6}{columns}"]
    for subject in sorted(bounds):
        cells = ""
        for version in tools.ASCENDNPU_IR:
            bound = bounds[subject][version]
            fits = bound.ub_bytes is not None
            cells += f"{bound.ub_bytes if fits else 'overflow':>11} {bound.lane_loops if fits else '-':>5}"
        names = f"{subject.kernel:<34} {subject.rule or '-':<16} {subject.elements:<8}"
        lines.append(f"{names} {subject.block or '-':>6}{cells}")
    FILE.write_text(_HEADER + "\n".join(lines) + "\n")


def refused(subject: Subject) -> bool:
    return refusal(ASCEND_910B, subject.kernel, subject.block, subject.element_bytes, subject.needs) is not None


def needed(subject: Subject) -> int:
    """The bytes that the tiling table says."""
    return ub_bytes(subject.kernel, subject.block, subject.element_bytes, subject.needs)


def most(of_versions: Mapping[str, Bound]) -> Bound:
    """Of all versions of the compiler."""
    return reduce(or_, of_versions.values())


def uncovered(bounds: Bounds) -> list[Subject]:
    """What the tiling table accepts although it overflows, or needs more than the table says."""
    wrong = []
    for subject, of_versions in bounds.items():
        measured_bytes = most(of_versions).ub_bytes
        if not refused(subject) and (measured_bytes is None or measured_bytes > needed(subject)):
            wrong.append(subject)
    return wrong


def forms(cases: Iterable[KernelCase], blocks: Iterable[int] = BLOCKS) -> Iterator[KernelCase]:
    """Each kernel in its forms, tested or not: without any flag, with each, and with all of them, in every block."""
    seen = set()
    for case in cases:
        flags = [flag for flag in _FLAGS if flag in case.constexprs]
        own = subject_of(case).block
        widest = _WIDEST.get(subject_of(case).kernel, max(BLOCKS))
        for block in [block for block in sorted({own, *blocks}) if block <= widest] if own else [0]:
            for chosen in ([], *([flag] for flag in flags), flags):
                constexprs = {**case.constexprs, **{flag: flag in chosen for flag in flags}}
                constexprs |= {name: block for name in _BLOCK_OF if name in constexprs}
                rows = step_rows if "STEP" in constexprs else lookup_rows
                constexprs |= {"ROWS": rows(block, ASCEND_910B)} if "ROWS" in constexprs else {}
                name = f"{case.kernel} {sorted(constexprs.items())} {sorted(case.signature.items())}"
                if name not in seen:
                    seen.add(name)
                    yield replace(case, name=name, constexprs=constexprs)


def measure(linalg: str, version: str) -> Bound:
    """Compile until nothing new is seen."""
    bound, same = compiled_once(linalg, version), 0
    while same < _MORE and bound.ub_bytes is not None:
        wider = bound | compiled_once(linalg, version)
        same = same + 1 if wider == bound else 0
        bound = wider
    return bound


def misfit(compiled: Bound, bound: Bound) -> str:
    """How a compilation contradicts its bound, which would have to be measured again; ``""``: it does not."""
    if compiled.ub_bytes is None or bound.ub_bytes is None:
        return "" if compiled.ub_bytes is bound.ub_bytes else f"one overflows: {compiled}, bound {bound}"
    if compiled.ub_bytes > bound.ub_bytes:
        return f"{compiled.ub_bytes} bytes of the unified buffer, the bound is {bound.ub_bytes}"
    if compiled.ub_bytes * _LOOSEST + _UNIT < bound.ub_bytes:
        return f"{compiled.ub_bytes} bytes of the unified buffer, the bound is much looser: {bound.ub_bytes}"
    if compiled.lane_loops > bound.lane_loops:
        return f"{compiled.lane_loops} loops through vectors, the bound is {bound.lane_loops}"
    return ""


def compiled_once(linalg: str, version: str) -> Bound:
    """What one compilation needs, rounded up."""
    try:
        return bound_of(compile_to_hivm(linalg, tools.bishengir_compile(version)))
    except UnifiedBufferOverflow:
        return Bound(None, 0)


def bound_of(compiled: Compiled) -> Bound:
    """What a compiled form needs, rounded up."""
    return Bound(-(-compiled.ub_bytes // _UNIT) * _UNIT, len(compiled.lane_loops))


def measure_all(cases: Iterable[KernelCase]) -> Bounds:
    """Every form of these kernels, up to the first block that overflows with each version."""
    every = list(forms(cases))
    answers = lower(every, tools.triton_ascend_folder())
    texts: dict[Subject, list[str]] = {}
    for form in every:
        answer = answers[form.name]
        if isinstance(answer, LoweringError):
            raise RuntimeError(f"{form.name}: {answer}")
        texts.setdefault(subject_of(form), []).append(answer.linalg)
    bounds: dict[Subject, dict[str, Bound]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for series, subjects in itertools.groupby(sorted(texts), lambda one: (one.kernel, one.rule, one.elements)):
            overflowed: dict[str, bool] = dict.fromkeys(tools.ASCENDNPU_IR, False)
            for subject in subjects:
                if all(overflowed.values()):
                    break
                for version in tools.ASCENDNPU_IR:
                    of_forms = (
                        [] if overflowed[version] else pool.map(measure, texts[subject], itertools.repeat(version))
                    )
                    bound = reduce(or_, of_forms, Bound(None if overflowed[version] else 0, 0))
                    overflowed[version] = bound.ub_bytes is None
                    bounds.setdefault(subject, {})[version] = bound
            print(*series, flush=True)
    return bounds


def main() -> None:
    from tests.ascend.cases import ON_ASCEND

    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--only", default="", metavar="PART", help="measure kernels whose names contain this")
    part = parser.parse_args().only
    chosen = [case for case in ON_ASCEND if part in subject_of(case).kernel]
    known = {subject_of(case).kernel for case in ON_ASCEND}
    kept = {subject: bound for subject, bound in read().items() if subject.kernel in known} if FILE.exists() else {}
    kept = {subject: bound for subject, bound in kept.items() if part and part not in subject.kernel}
    write({**kept, **measure_all(chosen)})


if __name__ == "__main__":
    main()
