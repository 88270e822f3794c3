"""``python -m recfx doctor`` on a simulated NPU, whose kernels Triton's interpreter runs: all is right."""

import json
from typing import Any

import pytest
import torch

from recfx.commandline.doctor import checks as checks_module
from recfx.commandline.doctor.cases import LookupCase
from recfx.commandline.doctor.checks import calls_of
from recfx.commandline.main import main
from recfx.kernels.build import launch, tuned

INTERPRETED = True


def examined(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main(["doctor", "--device", "npu:1", "--quick", "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("interpreted_kernels")
def test_all_kernels_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    report = examined(capsys)
    answers = {answer["name"]: answer for answer in report["answers"] if answer["where"] == "device"}
    assert {call.name for call in calls_of(LookupCase([1], 1), in_triton=True)} == answers.keys()
    assert [answer for answer in answers.values() if answer["wrong"] or answer["message"]] == []
    assert (report["how"], report["complete"], report["device_name"]) == ("interpreted", True, "Ascend910B3")
    findings = {finding["name"]: finding["what_to_do"] for finding in report["findings"]}
    assert "set_env.sh" in findings["CANN"]


@pytest.mark.usefixtures("interpreted_kernels")
@pytest.mark.parametrize("number", [0, 1])
def test_both_forms_of_lookups_are_right(number: int) -> None:
    for kind, call in checks_module.lookups_of_kinds(quick=True):
        with tuned.trying(tuned.VENDOR, kind, number):
            assert call.mismatch(torch.device("npu:1")) == "", kind


@pytest.mark.usefixtures("interpreted_kernels")
def test_a_kernel_that_cannot_be_compiled(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One is wrong, and the rest goes on: here, the one after it."""
    launch_kernel, chosen = launch.launch, ("find_rows_triton", "bag_offsets_triton")
    monkeypatch.setattr(checks_module, "calls_of", lambda *of: [call for call in calls_of(*of) if call.name in chosen])

    def fail(kernel: Any, number: int, *arguments: Any, **constants: Any) -> None:
        if kernel.fn.__name__ == "recfx_find_rows":
            raise RuntimeError("ub overflow")
        launch_kernel(kernel, number, *arguments, **constants)

    monkeypatch.setattr(launch, "launch", fail)
    report = examined(capsys)
    assert [answer["name"] for answer in report["answers"]] == [*chosen]
    wrong = [answer for answer in report["answers"] if answer["wrong"]]
    assert [answer["name"] for answer in wrong] == ["find_rows_triton"]
    assert "dims 1," in wrong[0]["smallest"]
    assert "ub overflow" in wrong[0]["traceback"]
    assert not report["ok"]
