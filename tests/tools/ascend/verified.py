"""What has been verified on what: the section of kernels/README.md, written from a run of the checks.

``python -m tests.tools.ascend.verified`` runs every level on every kernel, and writes the section only if all of
them passed and none was skipped.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import pytest

from recfx.kernels.build.tiling import ASCEND_910B
from tests.ascend import bounds, tools
from tests.ascend.bounds import BLOCKS, Subject, most, refused, subject_of
from tests.ascend.cases import ON_ASCEND
from tests.ascend.kernel_case import KernelCase

README = tools.ROOT / "kernels/README.md"
COMMAND = "python -m tests.tools.ascend.verified"
BEGIN, END = f"<!-- written by `{COMMAND}`: -->\n\n", "\n<!-- up to here -->\n"
WIDE = 1024
"""Columns for which the table gives the unified buffer."""


@dataclass(frozen=True)
class Level:
    """One way to check every compiled form of every kernel.

    Args:
        name: as the columns of the table are called.
        tests: ``file::function``, each with a parameter per form, and one per version if ``versions``.
        versions: of the compiler.
        launches: how often each call of a form is launched; 0: nothing is launched.
        what: which tool does what.
        proves: and what it leaves open.
    """

    name: str
    tests: tuple[str, ...]
    what: str
    proves: str
    versions: tuple[str, ...] = ()
    launches: int = 0

    def test_ids(self, case: KernelCase) -> Iterator[str]:
        """Those that have to pass for one form."""
        for test in self.tests:
            for parameters in [f"{case.name}-{version}" for version in self.versions] or [case.name]:
                yield f"tests/ascend/{test}[{parameters}]"

    def count(self, cases: Iterable[KernelCase]) -> int:
        """Launches where there are any, compilations elsewhere."""
        return sum(self.launches * len(case.calls) if self.launches else max(1, len(self.versions)) for case in cases)


LEVELS = (
    Level(
        "interpreted",
        ("test_interpreted.py::test_answers_as_its_reference",),
        f"Triton {tools.TRITON} runs the kernel in its interpreter, on the CPU, against the reference in torch",
        "the algorithm, its masks and dtypes; nothing about how it is compiled",
        launches=1,
    ),
    Level(
        "lowered",
        ("test_lint.py::test_no_kernel_uses_what_goes_wrong",),
        f"triton-ascend {tools.TRITON_ASCEND} lowers it to linalg; a lint looks for what is known to go wrong later",
        "that it can be lowered; nothing about what the result computes",
    ),
    Level(
        "lowered and run",
        (
            "test_linalg.py::test_computes_what_its_reference_does",
            "test_linalg.py::test_touches_nothing_outside_its_arguments",
        ),
        f"LLVM {tools.LLVM} builds that linalg for the CPU; it runs against the reference on one and four threads, and "
        "with guard pages right behind and right before every array",
        "that the linalg computes the right thing and touches nothing else; nothing about later stages, or speed",
        launches=4,
    ),
    Level(
        "HIVM",
        ("test_hivm.py::test_compiles_and_fits_as_the_bounds_say",),
        f"`bishengir-compile` of ascendnpu-ir {' and '.join(tools.ASCENDNPU_IR)} compiles it for {ASCEND_910B.name} "
        "up to HIVM, the last open stage, with planned memory",
        "that it fits into the unified buffer, and that vectors stay vectors; nothing about numbers, synchronization "
        "on the device, or what the closed `hivmc` makes of it",
        versions=tools.ASCENDNPU_IR,
    ),
    Level(
        "PTX and cubin",
        ("test_ptx.py::test_compiles_to_ptx_and_cubin",),
        f"Triton {tools.TRITON} compiles the same source for NVIDIA's sm_90, without a GPU",
        "that one source serves both; nothing about the run on a GPU",
    ),
)


@dataclass(frozen=True)
class Beyond:
    """Checks of what is around the kernels: whole files, of which every test has to pass."""

    name: str
    tests: str
    what: str
    proves: str


BEYOND = (
    Beyond(
        "models, interpreted",
        "tests/ascend/test_interpreted_targets.py",
        "lookups, optimizer steps and converted models on target `triton`, whose kernels the interpreter runs",
        "the operators and launchers around the kernels",
    ),
    Beyond(
        "models on a simulated NPU",
        "tests/ascend/npu_runtime",
        f"converted models on device `npu` of torch_npu {tools.TORCH_NPU}, with libraries that stand in for CANN's: "
        "operators compute on the CPU, and each kernel is replaced by its reference",
        "that the code around the kernels runs on another device; nothing about the device's numbers, limits or speed",
    ),
)

NOT_VERIFIED = (
    "No kernel has run on an NPU, and none was launched through torch_npu.",
    "CANN was never there: no device binary exists, because the compiler's last stage, `hivmc`, is part of CANN.",
    "An earlier state of the kernels ran once on a GPU, an H200, with right results; these have not.",
    "No kernel was timed on an NPU. On the H200, most were slower than FBGEMM's, by up to nine times.",
    "No collective of HCCL was called.",
)


def page() -> str:
    """The section, as the cases, the tools' versions and the bounds have it."""
    lines = ["| level | what runs | what it proves |", "|---|---|---|"]
    lines += [f"| {level.name} | {level.what} | {level.proves} |" for level in (*LEVELS, *BEYOND)]
    lines += [
        "",
        "How many launches were right at each level, or how many compilations where nothing is launched: all of them.",
        f"How many of the {ASCEND_910B.ub_bytes:,} bytes of {ASCEND_910B.name}'s unified buffer a kernel takes at most",
        f"on rows of {WIDE:,} columns, and how many columns would fit:",
        "",
        f"| kernel | forms | {' | '.join(level.name for level in LEVELS)} | unified buffer | fits up to |",
        f"|---|---|{'---|' * len(LEVELS)}---|---|",
    ]
    for kernel, cases in groupby(ON_ASCEND, lambda case: subject_of(case).kernel):
        lines.append(_row(kernel, list(cases)))
    lines += ["", "What was **not** verified:", "", *[f"- {sentence}" for sentence in NOT_VERIFIED]]
    return "\n".join(lines) + "\n"


def _row(kernel: str, cases: list[KernelCase]) -> str:
    cells = [f"{level.count(cases):,}" for level in LEVELS]
    return f"| `{kernel}` | {_forms(cases)} | {' | '.join(cells)} | {_unified_buffer(kernel)} | {_widest(kernel)} |"


def _forms(cases: list[KernelCase]) -> str:
    subjects = [subject_of(case) for case in cases]
    rules = list(dict.fromkeys(subject.rule for subject in subjects if subject.rule))
    elements = list(dict.fromkeys(subject.elements for subject in subjects))
    return f"{len(cases)}: {f'{len(rules)} rules, ' if rules else ''}{', '.join(elements)}"


def _unified_buffer(kernel: str) -> str:
    used = [
        most(of_versions).ub_bytes or 0
        for subject, of_versions in bounds.read().items()
        if subject.kernel == kernel and subject.block in (0, WIDE)
    ]
    share = max(used) / ASCEND_910B.ub_bytes
    return f"{max(used):,} ({f'{share:.0%}' if share >= 0.01 else 'under 1%'})"


def _widest(kernel: str) -> str:
    """How many columns the tiling table accepts: with the rule that takes most of the buffer, and with the lightest."""
    series = {(of.rule, of.elements) for of in bounds.read() if of.kernel == kernel and of.block}
    widest = {
        max(block for block in BLOCKS if not refused(Subject(kernel, rule, elements, block)))
        for rule, elements in series
    }
    return " to ".join(f"{block:,}" for block in sorted({min(widest), max(widest)})) if widest else "any size"


def written() -> str:
    """The section that the README has."""
    return README.read_text().partition(BEGIN)[2].partition(END)[0]


def not_passed(outcomes: Mapping[str, str]) -> list[str]:
    """What would have to pass for the section to be true, and did not.

    Args:
        outcomes: by test, as pytest calls them: passed, failed, skipped.
    """
    of_kernels = [test for level in LEVELS for case in ON_ASCEND for test in level.test_ids(case)]
    missing = [test for test in of_kernels if outcomes.get(test) != "passed"]
    for beyond in BEYOND:
        of_beyond = {test: outcome for test, outcome in outcomes.items() if test.startswith(beyond.tests)}
        missing += [test for test, outcome in of_beyond.items() if outcome != "passed"] if of_beyond else [beyond.tests]
    return missing


class _Outcomes:
    """A plugin for pytest that keeps what became of each test."""

    def __init__(self) -> None:
        self.by_test: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.by_test[report.nodeid] = report.outcome


def main() -> None:
    outcomes = _Outcomes()
    files = {f"tests/ascend/{test.partition('::')[0]}" for level in LEVELS for test in level.tests}
    files |= {beyond.tests for beyond in BEYOND}
    os.chdir(tools.ROOT)
    pytest.main(["-q", *sorted(files)], plugins=[outcomes])
    if missing := not_passed(outcomes.by_test):
        sys.exit(f"kernels/README.md stays as it is: {len(missing)} checks did not pass, among them {missing[0]}")
    write()


def write() -> None:
    """Replace the section of the README, and nothing else of it."""
    before, begin, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"kernels/README.md has lost the lines {BEGIN.strip()} and {END.strip()}")
    README.write_text(before + begin + page() + end + after)


if __name__ == "__main__":
    main()
