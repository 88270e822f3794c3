"""What the doctor says of the packages that are installed."""

from __future__ import annotations

import pytest

from recfx.doctor import packages
from recfx.doctor.packages import finding_of, needed
from recfx.doctor.report import Status

TORCH = ("torch", "2.13.0", "pip install torch==2.13.0")


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("cpu", ["torch==2.7.1", "fbgemm-gpu-cpu==1.2.0", "torchrec==1.2.0"]),
        ("cuda", ["torch==2.7.1", "fbgemm-gpu==1.2.0", "torchrec==1.2.0"]),
        ("npu", ["torch==2.7.1", "torch_npu==2.7.1.post11", "fbgemm-gpu-cpu==1.2.0", "torchrec==1.2.0"]),
    ],
)
def test_packages_of_a_set(device: str, expected: list[str]) -> None:
    packages = needed(device, "2.6.0")
    assert [f"{name}=={version}" for name, _, version, _ in packages] == expected
    assert all(set(expected) <= set(install.split()) for *_, install in packages)


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_a_torch_that_fits_is_never_replaced(device: str) -> None:
    torch, *others = needed(device, "2.7.0a0+git1")
    assert torch[2] == "2.7.0a0+git1"
    assert "torch==2.7.0a0+git1 " in torch[3]
    for name, _, version, install in others:
        again = finding_of("pip", version, install, "ValueError: odd").what_to_do
        for command in (install, again):
            assert "torch==2.7.1" not in command
            assert f"{name}=={version}" in command
        assert all("--no-deps" in part for part in again.split("&&")) or name == "torch_npu"


def test_what_is_here_is_right() -> None:
    assert [finding for finding in packages.packages("cpu") if finding.status != Status.OK] == []


def test_a_package_that_is_not_there() -> None:
    failure = packages._import_failure("recfx_of_nobody")
    assert failure == "ModuleNotFoundError: No module named 'recfx_of_nobody'"
    finding = finding_of("recfx-of-nobody", "1.0", "pip install recfx-of-nobody==1.0", failure)
    assert (finding.status, finding.what_to_do) == (Status.MISSING, "pip install recfx-of-nobody==1.0")


@pytest.mark.parametrize(("version", "fits"), [("2.13.1+cpu", True), ("2.13.0a0+git1", True), ("2.12.0", False)])
def test_minor_versions_have_to_fit(version: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda name: version)
    finding = finding_of(*TORCH, "")
    assert (finding.status, finding.what_to_do) == ((Status.OK, "") if fits else (Status.MISSING, TORCH[2]))


def test_failures_have_advice_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda name: "2.13.0")
    assert "source CANN" in finding_of(*TORCH, "ImportError: libhccl.so: cannot open shared object file").what_to_do
    assert "uninstall -y fbgemm-gpu" in finding_of(*TORCH, "OSError: libtorch_cuda.so: no such file").what_to_do
    assert finding_of(*TORCH, "ValueError: odd").what_to_do == "pip install --force-reinstall torch==2.13.0"
