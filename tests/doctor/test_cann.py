"""What the doctor reads from the files of CANN and of the driver, and says of what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from recfx.doctor.packages import cann
from recfx.doctor.report import Finding, Status


@pytest.fixture
def ascend(tmp_path: Path) -> Path:
    """A folder like the one of an installation, of CANN 8.5 with its compiler."""
    for name, text in {
        "ascend-toolkit/latest/version.cfg": "# version: 1.0\nruntime_running_version=[8.5.0:8.5.0]\n",
        "ascend-toolkit/set_env.sh": "",
        "bin/bishengir-compile": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bin/bishengir-compile").chmod(0o755)
    return tmp_path


def found_in(root: Path, **environment: str) -> dict[str, Finding]:
    findings = {finding.name: finding for finding in cann({"PATH": "", **environment}, (str(root),))}
    assert list(findings) == ["CANN", "Ascend compiler"]
    return findings


def test_all_is_well(ascend: Path) -> None:
    home = str(ascend / "ascend-toolkit/latest")
    findings = found_in(ascend, ASCEND_HOME_PATH=home, PATH=str(ascend / "bin"))
    assert [(finding.found, finding.status) for finding in findings.values()] == [
        (f"8.5.0 in {home}", Status.OK),
        (str(ascend / "bin/bishengir-compile"), Status.OK),
    ]


def test_the_environment_script_was_not_sourced(ascend: Path) -> None:
    findings = found_in(ascend)
    assert findings["CANN"].status == Status.MISSING
    assert findings["CANN"].what_to_do == f"source {ascend / 'ascend-toolkit/set_env.sh'}"
    assert findings["Ascend compiler"].status == Status.MISSING


def test_nothing_is_there(tmp_path: Path) -> None:
    findings = found_in(tmp_path)
    assert [finding.status for finding in findings.values()] == [Status.MISSING] * 2


@pytest.mark.parametrize(
    ("text", "status"), [("version=8.3.RC1", Status.MISSING), ("version=9.1.0", Status.OK), ("", Status.OK)]
)
def test_versions(text: str, status: Status, ascend: Path) -> None:
    home = ascend / "other"
    (home / "version.cfg").mkdir(parents=True)  # like a file that may not be read
    (home / "x86_64-linux").mkdir()
    (home / "x86_64-linux/ascend_toolkit_install.info").write_text(f"package_name=Ascend\n{text}\n")
    assert found_in(ascend, ASCEND_HOME_PATH=str(home))["CANN"].status == status
