"""What the doctor says of devices, of CANN and of the driver."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recfx.commandline.doctor import examine as examine_module
from recfx.commandline.doctor.examine import machine, no_device
from recfx.commandline.doctor.packages import cann
from recfx.commandline.doctor.report import Finding


def test_the_cpu() -> None:
    findings = {finding.name: finding for finding in machine("cpu")}
    assert list(findings) == ["device", "Triton", "recfx's library"]
    assert {finding.what_to_do for finding in findings.values()} == {""}


def test_a_device_that_is_not_there() -> None:
    assert "sees no npu device" in no_device("npu")
    findings = {finding.name: finding for finding in machine("npu:1")}
    assert "npu-smi" in findings["device"].what_to_do
    assert "Triton" not in findings


@pytest.mark.parametrize(("kind", "package"), [("npu", "triton-ascend==3.2.0"), ("cuda", "triton==3.3.1")])
def test_the_triton_of_the_set_is_to_be_installed(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine_module, "no_device", lambda device: "")
    monkeypatch.setattr(examine_module, "name_of", lambda device: "a chip")
    monkeypatch.setattr(examine_module.launch, "why_not", lambda device: "there is none.")
    monkeypatch.setattr(examine_module.torch, "device", lambda kind: SimpleNamespace(type=kind))
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu128")
    (finding,) = (one for one in machine(kind) if one.name == "Triton")
    assert (finding.found, finding.what_to_do.rpartition(" ")[2]) == ("there is none", package)


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
    assert [(finding.found, finding.what_to_do) for finding in findings.values()] == [
        (f"8.5.0 in {home}", ""),
        (str(ascend / "bin/bishengir-compile"), ""),
    ]


def test_the_environment_script_was_not_sourced(ascend: Path, tmp_path: Path) -> None:
    findings = found_in(ascend)
    assert findings["CANN"].what_to_do == f"source {ascend / 'ascend-toolkit/set_env.sh'}"
    for of_root in (findings, found_in(tmp_path / "nothing")):
        assert all(finding.what_to_do for finding in of_root.values())


@pytest.mark.parametrize(("text", "fits"), [("version=8.3.RC1", False), ("version=9.1.0", True), ("", True)])
def test_versions(text: str, fits: bool, ascend: Path) -> None:
    home = ascend / "other"
    (home / "version.cfg").mkdir(parents=True)  # like a file that may not be read
    (home / "x86_64-linux").mkdir()
    (home / "x86_64-linux/ascend_toolkit_install.info").write_text(f"package_name=Ascend\n{text}\n")
    assert (found_in(ascend, ASCEND_HOME_PATH=str(home))["CANN"].what_to_do == "") is fits
