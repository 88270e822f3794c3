"""Kernels against their references, with the smallest shape that shows what is wrong; and how fast they are."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from recfx.commandline.doctor import speed as speed_module
from recfx.commandline.doctor.cases import LookupCase
from recfx.commandline.doctor.checks import ON_A_DEVICE, Call, calls_of, check, check_all, mismatch
from recfx.commandline.doctor.report import Answer, Report
from recfx.commandline.doctor.speed import best_of, measure, right_numbers
from recfx.kernels.build import library, tuned

CPU = torch.device("cpu")


def answer(doubled: Any) -> Answer:
    calls = {
        f"{count} numbers": Call("mix64", doubled, lambda numbers: numbers * 2, (torch.arange(count) / 1,))
        for count in (1, 2, 3, 4)
    }
    return check(calls, CPU, "device", quick=True)


@pytest.fixture(autouse=True)
def _no_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "opcheck", lambda *arguments: None)


def crash(numbers: torch.Tensor) -> torch.Tensor:
    assert numbers.numel() != 2, "no code\nfor this"
    return numbers * 2


def test_the_smallest_case_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert answer(lambda numbers: numbers + numbers) == Answer("mix64", "device", 4)
    wrong = answer(lambda numbers: numbers * 2 + (numbers.numel() > 2))
    assert (wrong.checked, wrong.wrong, wrong.smallest) == (4, 2, "3 numbers")
    raised = answer(crash)
    assert (raised.wrong, raised.smallest, raised.message) == (1, "2 numbers", "AssertionError: no code")
    assert "in crash" in raised.traceback
    with pytest.raises(KeyboardInterrupt):
        answer(mock.Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(Call, "opcheck", mock.Mock(side_effect=RuntimeError("no fake")))
    refused = answer(lambda numbers: numbers * 2)
    assert (refused.wrong, refused.message) == (0, "opcheck: RuntimeError: no fake")


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.int64)),
        (None, torch.ones(2)),
        ([torch.ones(1)], []),
        ([torch.ones(1), torch.ones(1)], [torch.ones(1), torch.zeros(1)]),
        (torch.tensor([2**40 + 1]), torch.tensor([2**40])),
        (torch.tensor([1.01]), torch.tensor([1.0])),
        (torch.tensor([torch.nan]), torch.tensor([0.0])),
    ],
)
def test_what_differs(actual: Any, expected: Any) -> None:
    assert mismatch(actual, expected, ON_A_DEVICE)
    assert mismatch(expected, expected, {}) == ""


def test_the_kernels_of_the_host_are_right() -> None:
    answers = list(check_all(CPU, quick=True))
    assert [answer for answer in answers if answer.message or answer.where != "host"] == []
    assert len(answers) == len(list(calls_of(LookupCase([1], 1), in_triton=False)))


def test_every_operator_in_triton_is_looked_at() -> None:
    library.operators()
    known = {name.removeprefix("recfx::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    in_triton = {name for name in known if name.rstrip("_").endswith("_triton")}
    looked_at = {call.name.partition(":")[0] for call in calls_of(LookupCase([1], 1), in_triton=True)}
    assert len(in_triton) > 4
    assert in_triton - looked_at == set(), "recfx/commandline/doctor/checks.py has no line for it"


NPU: Any = SimpleNamespace(type="npu")
CASE = LookupCase([8, 8], 4, rows=50)
CALL = Call("pooled_lookup_triton", print, print, (), bytes=1000)


def measured(monkeypatch: pytest.MonkeyPatch, device: Any, quick: bool = True) -> Report:
    monkeypatch.setattr(speed_module, "workload", lambda device, quick: CASE)
    report = Report("cpu", "Ascend910B3", quick=quick)
    measure(report, device)
    return report


def test_every_kernel_of_the_cpu_has_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(monkeypatch, CPU)
    speeds = {speed.name: speed for speed in report.speeds}
    assert list(speeds)[:2] == ["copy", "pooled_lookup"]
    assert {"fused_step_: sgd", "fused_step_: adam", "bucketize"} <= speeds.keys()
    assert speeds["copy"].share_of_copy == pytest.approx(1.0)
    lookup, ids = speeds["pooled_lookup"], CASE.rows.numel()
    assert lookup.bytes == ids * (8 + 32) + 8 * 13 + 3 * 4 * 32
    of_tables = (own[own >= 0] for own in CASE.rows.tensor_split([int(CASE.borders[2])]))
    touched = sum(own.unique().numel() for own in of_tables)
    assert speeds["fused_step_: sgd"].bytes == lookup.bytes + 2 * touched * 32
    assert speeds["fused_step_: adam"].bytes == lookup.bytes + 2 * touched * 32 * 3
    assert lookup.gb_s == pytest.approx(lookup.bytes / (lookup.milliseconds / 1e3) / 1e9)
    assert lookup.share_of_copy == pytest.approx(lookup.gb_s / speeds["copy"].gb_s)


@pytest.mark.parametrize(("times", "place"), [((1.0, 0.9, 1.2), 1), ((1.0, 0.98, 1.2), 0), ((1.0, 0.9, 0.5), 2)])
@pytest.mark.parametrize("setting", [tuned.PROGRAMS_PER_CORE, tuned.ROWS_IN_FLIGHT])
def test_another_number_has_to_be_worth_it(
    setting: str, times: tuple[float, ...], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = speed_module.CANDIDATES[setting]["npu"]
    assert {*candidates, *speed_module.CANDIDATES[setting]["cuda"]} <= {*tuned.ALLOWED[setting][CALL.kernel]}
    by_number = dict(zip(candidates, times, strict=True))

    def time_of(call: Call, device: torch.device, quick: bool) -> float:
        return by_number[tuned.number("", setting, CALL.kernel) or 0]

    monkeypatch.setattr(speed_module, "median_ms", time_of)
    choice = best_of(CALL, setting, CALL.kernel, candidates, NPU, quick=False)
    assert (choice.milliseconds, choice.chosen) == (by_number, candidates[place])
    assert choice.kept_in == ""


def test_what_is_chosen_is_kept_if_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_module, "kernels_here", lambda device: [(True, device)])
    monkeypatch.setattr(speed_module, "calls_of", lambda case, in_triton: [CALL])
    monkeypatch.setattr(speed_module, "lookups_of_kinds", lambda quick: [(KIND, Call(KIND, print, print, ()))])
    kept: dict[str, Any] = {}
    monkeypatch.setattr(speed_module, "median_ms", lambda call, device, quick: 2.0)
    monkeypatch.setattr(tuned, "keep", lambda name, choices: kept.update({name: choices}) or "tuned.json")
    report = measured(monkeypatch, NPU, quick=False)
    chosen = {"programs_per_core": {"recfx_pooled_lookup": 1}, "rows_in_flight": {"recfx_pooled_lookup": 32}}
    assert kept == {"Ascend910B3": {**chosen, "vendor_operators": {KIND: 1}}}
    assert [choice.kept_in for choice in report.choices] == ["tuned.json"] * 3
    assert [choice.kept_in for choice in measured(monkeypatch, NPU, quick=True).choices] == [""] * 3
    assert len(kept) == 1
    monkeypatch.setattr(tuned, "keep", mock.Mock(side_effect=PermissionError("read-only")))
    report = measured(monkeypatch, NPU, quick=False)
    assert [choice.kept_in for choice in report.choices] == [""] * 3
    assert "read-only" in str(report)


KIND = "SUM float32 64"


def vendor_or_not(number: str) -> torch.Tensor | None:
    """Right in Triton alone."""
    return torch.ones(1) if tuned.number("", tuned.VENDOR, KIND) else None


def test_operators_of_the_vendor_that_are_wrong_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_module, "median_ms", lambda call, device, quick: 1.0)
    report, call = Report("npu"), Call(KIND, vendor_or_not, print, ("1",))
    numbers = right_numbers(report, call, tuned.VENDOR, KIND, NPU)
    assert best_of(call, tuned.VENDOR, KIND, numbers, NPU, quick=True).chosen == 0
    assert [(answer.name, answer.wrong) for answer in report.answers] == [(f"vendor_operators 1 of {KIND}", 1)]
