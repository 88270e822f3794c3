"""What kernels/README.md says has been verified is what there is to verify."""

import pytest

from tests.ascend import tools
from tests.ascend.cases import ON_ASCEND
from tests.tools.ascend import verified

STALE = f"`{verified.COMMAND}` runs the checks and writes the section of kernels/README.md again"


def everything() -> dict[str, str]:
    """The outcomes of a run in which all went well."""
    of_kernels = [test for level in verified.LEVELS for case in ON_ASCEND for test in level.test_ids(case)]
    return dict.fromkeys([*of_kernels, *(f"{beyond.tests}::test" for beyond in verified.BEYOND)], "passed")


def test_the_section_is_not_stale() -> None:
    assert verified.written() == verified.page(), STALE


def test_the_section_depends_on_the_kernels_and_their_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verified, "ON_ASCEND", ON_ASCEND[1:])
    assert verified.written() != verified.page()


def test_the_section_names_every_tool_with_its_version() -> None:
    versions = (tools.TRITON, tools.TRITON_ASCEND, tools.TORCH_NPU, f"LLVM {tools.LLVM}", *tools.ASCENDNPU_IR)
    assert [version for version in versions if version not in verified.written()] == []


def test_the_tests_that_it_stands_on_are_there() -> None:
    for level in verified.LEVELS:
        for test in level.tests:
            file, _, function = test.partition("::")
            assert f"\ndef {function}(name: str" in (tools.ROOT / "tests/ascend" / file).read_text()
    assert [beyond.tests for beyond in verified.BEYOND if not (tools.ROOT / beyond.tests).exists()] == []


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_one_check_that_did_not_pass_is_enough_not_to_write(outcome: str) -> None:
    assert verified.not_passed(everything()) == []
    for test in (next(verified.LEVELS[3].test_ids(ON_ASCEND[-1])), f"{verified.BEYOND[1].tests}::test"):
        assert verified.not_passed(everything() | {test: outcome}) == [test]


def test_checks_that_did_not_run_are_not_written_either() -> None:
    absent = verified.not_passed({})
    assert set(absent) == {
        *(test for test in everything() if "[" in test),
        *(beyond.tests for beyond in verified.BEYOND),
    }
