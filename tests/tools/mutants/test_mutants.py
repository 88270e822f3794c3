"""``make mutants``: which faults it makes, which tests judge them, what it says of them, and that it leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from tests.tools.mutants import choose_tests, mutate
from tests.tools.mutants.__main__ import equivalents, files_of, sample
from tests.tools.mutants.choose_tests import tests_for as files_that_judge

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_faults_in_python_leave_a_module_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "add.py"
    path.write_text("def add(a, b):\n    if a:\n        print(a)\n    return a + b\n")
    changes = {mutant.change for mutant in mutate.mutants_of(path)}
    assert {"- return a + b + return a - b", "- if a: + if not (a):", "- print(a) + pass"} <= changes


def test_a_sample_is_that_of_its_seed_and_of_no_line_twice() -> None:
    files = [
        Path("recfx/runtime/base.py"),
        Path("recfx/planner/pricing/work.py"),
    ]
    drawn = [[(mutant.path, mutant.line, mutant.change) for mutant in sample(files, 12, seed)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == len({place[:2] for place in drawn[0]}) == 12
    everything = sample(files, 10_000, 1)
    assert {mutant.path for mutant in everything} == set(files)
    assert len({(mutant.path, mutant.line) for mutant in everything}) == len(everything)


def test_every_file_of_the_product_is_judged_by_tests_that_are_there() -> None:
    files = [path for name in ("recfx", "lowering", "kernels") for path in files_of(name)]
    assert {Path("recfx/errors.py"), Path("lowering/cpu.py")} <= set(files)
    for path in files:
        judges = files_that_judge(path)
        assert judges, path
    assert files_that_judge(Path("recfx/discovery/sample.py"))[0] == "tests/discovery/test_sample.py"
    packages = {choose_tests.package_of(path) for path in files}
    assert [name for name in choose_tests.BESIDE if name not in packages] == []
    named = {*choose_tests.LAST, *(place for places in choose_tests.BESIDE.values() for place in places)}
    assert [name for name in named if not Path("tests", name).exists()] == []


def test_equivalent_mutants_are_of_lines_that_are_there() -> None:
    for file, change in equivalents():
        first = change.removeprefix("- ").split(" + ")[0].split(" - ")[0]
        assert first in " ".join(Path(file).read_text().split()), (file, change)


# Not `-m tests.tools.mutants`: Python would take the tests of the directory where it runs.
RUN = [
    sys.executable,
    "-c",
    f"import sys; sys.path[0] = {str(ROOT)!r}; from tests.tools.mutants.__main__ import main; sys.exit(main())",
]
FILES = {
    "recfx/__init__.py": "",
    "recfx/conversion/__init__.py": "",
    "recfx/conversion/double.py": """\
        def double(number):
            return 2 * number


        def nobody_calls(number):
            return number + 5
        """,
    "tests/__init__.py": "",
    "tests/conftest.py": """\
        import hypothesis

        hypothesis.settings.register_profile("recfx-ci", hypothesis.settings())
        """,
    "tests/conversion/__init__.py": "",
    "tests/conversion/test_double.py": """\
        from recfx.conversion.double import double


        def test_double():
            assert double(3) == 6
        """,
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository: one function that is tested, and one that is not."""
    root = tmp_path / "project"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(dedent(text))
    subprocess.run(["git", "init", "-q", "."], cwd=root, check=True)
    subprocess.run(["git", "add", "-A"], cwd=root, check=True)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return root


def changed(project: Path) -> str:
    """What git sees that was not there before."""
    command = ["git", "status", "--porcelain", "--untracked-files=all"]
    shown = subprocess.run(command, cwd=project, capture_output=True, check=True, text=True, timeout=500).stdout
    return "".join(line for line in shown.splitlines(keepends=True) if not line.startswith("A  "))


def left_behind(project: Path) -> list[Path]:
    """Temporary files, apart from a folder that importing torch makes."""
    return [path for path in (project.parent / "temporary").iterdir() if not path.name.startswith("torchinductor_")]


def test_what_is_tested_is_killed_what_is_not_survives_and_nothing_stays(project: Path) -> None:
    command = [*RUN, "recfx/conversion", "--sample", "99"]
    finished = subprocess.run(command, cwd=project, capture_output=True, check=False, text=True, timeout=500)
    assert finished.returncode == 1, finished.stderr
    lines = finished.stdout.splitlines()
    told = {" ".join(line.split()[1:4]).split(" (")[0] for line in lines if line[:3].strip().isdigit() and ":" in line}
    assert told == {
        "killed recfx/conversion/double.py:2",
        "SURVIVED recfx/conversion/double.py:6",
    }
    assert "-    return number + 5" in lines
    assert lines[-1].startswith("1 of 2 killed")
    assert not any("FAILS WITHOUT A MUTANT" in line for line in lines)
    assert changed(project) == ""
    assert left_behind(project) == []


def test_a_run_that_is_ended_leaves_nothing(project: Path) -> None:
    (project / "tests/conversion/test_double.py").write_text(
        "import time\n\n\ndef test_double():\n    open('begun', 'w')\n    time.sleep(600)\n"
    )
    before = changed(project)
    command = [*RUN, "recfx/conversion"]
    temporary = project.parent / "temporary"
    with subprocess.Popen(command, cwd=project, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 240
        while not list(temporary.glob("*/copy/begun")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 1
    assert left_behind(project) == []
    assert changed(project) == before
