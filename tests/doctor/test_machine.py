"""What the doctor says of devices, and of recfx's own library."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from recfx.doctor import examine as examine_module
from recfx.doctor.examine import how, machine, no_device
from recfx.doctor.report import Status


def test_the_cpu() -> None:
    findings = {finding.name: finding for finding in machine("cpu")}
    assert list(findings) == ["device", "Triton", "recfx's library"]
    assert {finding.status for finding in findings.values()} == {Status.OK}
    assert how("cpu") == "real"


def test_a_device_that_is_not_there() -> None:
    assert "sees no npu device" in no_device("npu")
    findings = {finding.name: finding for finding in machine("npu:1")}
    assert findings["device"].status == Status.MISSING
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


def test_a_simulated_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert how("npu") == "real"
    monkeypatch.setenv(examine_module.SIMULATED, "2")
    assert (how("npu"), how("npu:1"), how("cpu")) == ("simulated", "simulated", "real")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert how("cpu") == "interpreted"
