"""What the doctor says of the packages that are installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from recfx.doctor import packages
from recfx.doctor.finding import Status
from recfx.doctor.packages import PACKAGES, Package, finding_of, fits, import_failure

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
GONE = Package("recfx-of-nobody", "recfx_of_nobody", "1.0", "recfx-of-nobody==1.0")


@pytest.mark.parametrize("device", PACKAGES)
def test_versions_are_those_that_recfx_is_installed_with(device: str) -> None:
    pinned = {
        each.name: each.specifier
        for each in map(Requirement, PROJECT["dependencies"] + PROJECT["optional-dependencies"][device])
    }
    found = {package.name: package.version for package in PACKAGES[device]}
    assert {"torch", "torchrec", "fbgemm-gpu"} <= set(found)
    assert all(found[name] in specifier for name, specifier in pinned.items() if name in found)
    assert found.keys() - pinned.keys() <= {"fbgemm-gpu-cpu"}  # which the stand-in installs


def test_pythons_are_those_of_the_project() -> None:
    least, most = (".".join(map(str, version)) for version in packages.PYTHON)
    assert PROJECT["requires-python"] == f">={least},<{most}"


def test_what_is_here_is_right() -> None:
    assert [finding for finding in packages.packages("cpu") if finding.status != Status.OK] == []


@pytest.mark.parametrize(
    ("version", "wanted", "expected"),
    [("2.13.0+cpu", "2.13.0", True), ("2.13.1", "2.13.0", False), ("1.8.0", "1.8.0+cpu", False)],
)
def test_a_build_counts_only_if_it_is_wanted(version: str, wanted: str, expected: bool) -> None:
    assert fits(version, wanted) is expected


def test_a_package_that_is_not_there() -> None:
    failure = import_failure(GONE.module)
    assert failure == "ModuleNotFoundError: No module named 'recfx_of_nobody'"
    found = finding_of(GONE, failure)
    assert (found.status, found.found) == (Status.MISSING, "not installed")
    assert found.what_to_do == "pip install recfx-of-nobody==1.0"


def test_a_version_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda name: "2.12.0")
    found = finding_of(PACKAGES["cpu"][0], "")
    assert (found.status, found.found) == (Status.MISSING, "2.12.0, which does not fit: 2.13.0 does")


def test_failures_have_advice_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which the reason is elsewhere; and what fails for the same reason says no more."""
    monkeypatch.setattr(packages, "installed", lambda name: "2.13.0")
    torch, *_ = PACKAGES["npu"]
    assert "source CANN" in finding_of(torch, "ImportError: libhccl.so: cannot open shared object file").what_to_do
    assert "uninstall fbgemm-gpu" in finding_of(torch, "OSError: libtorch_cuda.so: no such file").what_to_do
    assert finding_of(torch, "ValueError: odd").what_to_do == "pip install torch==2.13.0 --force-reinstall"
    assert "either" in finding_of(torch, "ValueError: odd", is_known=True).found
