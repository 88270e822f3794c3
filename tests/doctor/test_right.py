"""Kernels against their references: what is wrong is found, with the smallest shape that shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recfx.doctor.cases import LookupCase
from recfx.doctor.checks import (
    ON_A_DEVICE,
    Call,
    calls_of,
    check,
    check_all,
    mismatch,
)
from recfx.doctor.report import Answer
from recfx.kernels.build import library

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


def test_all_is_right() -> None:
    assert answer(lambda numbers: numbers + numbers) == Answer("mix64", "device", 4)


def test_wrong_from_some_size_on() -> None:
    wrong = answer(lambda numbers: numbers * 2 + (numbers.numel() > 2))
    assert (wrong.checked, wrong.wrong, wrong.smallest) == (4, 2, "3 numbers")
    assert "Mismatched elements: 3 / 3" in wrong.message


def test_what_is_raised_is_a_result() -> None:
    def crash(numbers: torch.Tensor) -> torch.Tensor:
        assert numbers.numel() != 2, "no code\nfor this"
        return numbers * 2

    wrong = answer(crash)
    assert (wrong.wrong, wrong.smallest, wrong.message) == (1, "2 numbers", "AssertionError: no code")
    assert "in crash" in wrong.traceback


def test_ctrl_c_is_no_result() -> None:
    def interrupted(numbers: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(interrupted)


def test_what_opcheck_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("no fake")

    monkeypatch.setattr(Call, "opcheck", refuse)
    wrong = answer(lambda numbers: numbers * 2)
    assert (wrong.wrong, wrong.message) == (0, "opcheck: RuntimeError: no fake")


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
    assert in_triton - looked_at == set(), "recfx/doctor/checks.py has no line for it"
