"""How fast kernels are: medians, shares, and the numbers that are chosen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recfx.doctor import speed as speed_module
from recfx.doctor.cases import LookupCase
from recfx.doctor.checks import Call
from recfx.doctor.report import Report
from recfx.doctor.speed import best_of, measure
from recfx.kernels.build import tuned

CPU = torch.device("cpu")
NPU: Any = SimpleNamespace(type="npu")
CASE = LookupCase([8, 8], 4, rows=50)


def nothing() -> None: ...


CALL = Call("pooled_lookup_triton", nothing, nothing, (), bytes=1000)


def measured(monkeypatch: pytest.MonkeyPatch, device: Any, quick: bool = True) -> Report:
    monkeypatch.setattr(speed_module, "workload", lambda device, quick: CASE)
    report = Report("cpu", "Ascend910B3", quick=quick)
    measure(report, device)
    return report


def one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_module, "kernels_here", lambda device: [(True, device)])
    monkeypatch.setattr(speed_module, "calls_of", lambda case, in_triton: [CALL])


def test_every_kernel_of_the_cpu_has_a_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    report = measured(monkeypatch, CPU)
    speeds = {speed.name: speed for speed in report.speeds}
    assert list(speeds)[:2] == ["copy", "pooled_lookup"]
    assert {"fused_step_: sgd", "fused_step_: adam", "bucketize"} <= speeds.keys()
    assert speeds["copy"].share_of_copy == pytest.approx(1.0)
    lookup, ids = speeds["pooled_lookup"], CASE.rows.numel()
    assert lookup.bytes == ids * (8 + 32) + 8 * 13 + 3 * 4 * 32
    touched = sum(own.unique().numel() for own in rows_of_tables())
    assert speeds["fused_step_: sgd"].bytes == lookup.bytes + 2 * touched * 32
    assert speeds["fused_step_: adam"].bytes == lookup.bytes + 2 * touched * 32 * 3
    assert lookup.gb_s == pytest.approx(lookup.bytes / (lookup.milliseconds / 1e3) / 1e9)
    assert lookup.share_of_copy == pytest.approx(lookup.gb_s / speeds["copy"].gb_s)


def rows_of_tables() -> list[torch.Tensor]:
    first, last = CASE.rows[: CASE.borders[2]], CASE.rows[CASE.borders[2] :]
    return [first[first >= 0], last[last >= 0]]


@pytest.mark.parametrize(("times", "place"), [((1.0, 0.9, 1.2), 1), ((1.0, 0.98, 1.2), 0), ((1.0, 0.9, 0.5), 2)])
@pytest.mark.parametrize("setting", tuned.ALLOWED)
def test_another_number_has_to_be_worth_it(
    setting: str, times: tuple[float, ...], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidates = speed_module.CANDIDATES[setting]["npu"]
    by_number = dict(zip(candidates, times, strict=True))

    def time_of(call: Call, device: torch.device, quick: bool) -> float:
        return by_number[tuned.number("", setting, CALL.kernel) or 0]

    monkeypatch.setattr(speed_module, "median_ms", time_of)
    choice = best_of(CALL, setting, NPU, quick=False)
    assert (choice.milliseconds, choice.chosen) == (by_number, candidates[place])
    assert choice.kept_in == ""


@pytest.mark.parametrize("setting", tuned.ALLOWED)
@pytest.mark.parametrize("device", ["npu", "cuda"])
def test_only_numbers_are_tried_that_can_be_kept(setting: str, device: str) -> None:
    assert set(speed_module.CANDIDATES[setting][device]) <= set(tuned.ALLOWED[setting][CALL.kernel])


def test_what_is_chosen_is_kept_if_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    one_call(monkeypatch)
    kept: dict[str, Any] = {}
    monkeypatch.setattr(speed_module, "median_ms", lambda call, device, quick: 2.0)
    monkeypatch.setattr(tuned, "keep", lambda name, choices: kept.update({name: choices}) or "tuned.json")
    report = measured(monkeypatch, NPU, quick=False)
    chosen = {"programs_per_core": {"recfx_pooled_lookup": 1}, "rows_in_flight": {"recfx_pooled_lookup": 32}}
    assert kept == {"Ascend910B3": chosen}
    assert [choice.kept_in for choice in report.choices] == ["tuned.json"] * 2
    kept.clear()
    assert [choice.kept_in for choice in measured(monkeypatch, NPU, quick=True).choices] == [""] * 2
    assert kept == {}

    def refuse(*arguments: object) -> Path:
        raise PermissionError("read-only")

    monkeypatch.setattr(tuned, "keep", refuse)
    report = measured(monkeypatch, NPU, quick=False)
    assert [choice.kept_in for choice in report.choices] == [""] * 2
    assert "read-only" in str(report)
