"""The table of sets in tests/README.md is what their records say, and each failure has a cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.matrix import record

RECORDS = sorted(record.RECORDS.glob("*.json"))
README = (record.ROOT / "tests" / "README.md").read_text()
XML = """<testsuites><testsuite>
<testcase classname="tests.ir.test_graph" name="test_one[a.b]" />
<testcase classname="tests.ir.test_graph" name="test_two"><failure message="no" /></testcase>
<testcase classname="tests.ir.test_graph" name="test_two"><error message="nor after it" /></testcase>
<testcase classname="tests.ir.test_graph" name="test_three"><skipped message="needs TorchRec 1.8" /></testcase>
<testcase classname="tests.test_versions.TestCase" name="test_four" />
<testcase classname="" name="tests.ops.test_five"><error message="cannot be collected" /></testcase>
</testsuite></testsuites>"""


def test_the_table_is_that_of_the_records() -> None:
    begin, end = "the records say:\n\n", "\n\n## Benchmarks"
    assert README.partition(begin)[2].partition(end)[0] == record.table(), "python -m tests.tools.matrix.record"


@pytest.mark.parametrize("path", RECORDS, ids=[path.stem for path in RECORDS])
def test_each_failure_has_a_cause(path: Path) -> None:
    folders = json.loads(path.read_text())["folders"]
    assert [name for folder in folders.values() for name in folder["failed"] if not record.cause(path.stem, name)] == []


@pytest.mark.parametrize("path", RECORDS, ids=[path.stem for path in RECORDS])
def test_records_are_of_the_sets_of_now(path: Path) -> None:
    (versions,) = (set_of_versions for set_of_versions in record.SETS if set_of_versions.name == path.stem)
    facts = json.loads(path.read_text())
    assert (facts["torch"], facts["torchrec"], facts["fbgemm"]) == (versions.torch, versions.torchrec, versions.fbgemm)


def test_what_pytest_has_written_is_read_by_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RECORDS", tmp_path / "records")
    (tmp_path / "results.xml").write_text(XML)
    files = record.read(tmp_path / "results.xml")
    assert files == {
        "tests/ir/test_graph.py": {
            "passed": 1,
            "failed": ["tests/ir/test_graph.py::test_two"],
            "skipped": {"needs TorchRec 1.8": 1},
        },
        "tests/test_versions.py": {"passed": 1, "failed": [], "skipped": {}},
        "tests/ops/test_five.py": {"passed": 0, "failed": ["tests/ops/test_five.py"], "skipped": {}},
    }
    assert record.unexplained("2.7", files) == ["tests/ir/test_graph.py", "tests/ops/test_five.py"]
    files["tests/ir/test_names.py"] = {"passed": 3, "failed": [], "skipped": {"needs TorchRec 1.8": 2}}
    folders = json.loads(record.keep(record.SETS[0], "3.11", files).read_text())["folders"]
    assert list(folders) == ["tests", "tests/ir", "tests/ops"]
    assert (folders["tests/ir"]["passed"], folders["tests/ir"]["skipped"]) == (4, {"needs TorchRec 1.8": 3})
    assert "| 2.7.1 | 1.2.0 | 1.2.0 | 3.3.1 | 3.11 | 3 | 5 | 2 | 3 |" in record.table()
