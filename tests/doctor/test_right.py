"""Kernels against their references: what is wrong is found, with the smallest shape that shows it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from recfx.doctor.checks import (
    ON_A_DEVICE,
    KernelCheck,
    device_checks,
    host_checks,
    kernels_here,
    mismatch,
    tolerances,
)
from recfx.doctor.shapes import Shape
from recfx.kernels.build import library

CPU = torch.device("cpu")


def shapes(quick: bool) -> Iterator[Shape]:
    for count in (1, 2) if quick else (1, 2, 3, 4):
        yield Shape(f"{count} numbers", (torch.arange(count, dtype=torch.float32),))


def check(doubled: Any) -> KernelCheck:
    return KernelCheck("mix64", shapes, doubled, lambda numbers: numbers * 2)


@pytest.fixture(autouse=True)
def _no_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelCheck, "opcheck", lambda *arguments: None)


def test_all_is_right() -> None:
    answer = check(lambda numbers: numbers + numbers).run(CPU, "device", quick=True)
    assert (not answer.message, answer.checked, answer.wrong, answer.smallest, answer.traceback) == (True, 2, 0, "", "")


def test_wrong_from_some_size_on() -> None:
    answer = check(lambda numbers: numbers * 2 + (numbers.numel() > 2)).run(CPU, "device", quick=False)
    assert (not answer.message, answer.checked, answer.wrong, answer.smallest) == (False, 4, 2, "3 numbers")
    assert "Mismatched elements: 3 / 3" in answer.message


def test_what_is_raised_is_a_result() -> None:
    def crash(numbers: torch.Tensor) -> torch.Tensor:
        assert numbers.numel() != 2, "no code\nfor this"
        return numbers * 2

    answer = check(crash).run(CPU, "device", quick=False)
    assert (answer.wrong, answer.smallest, answer.message) == (1, "2 numbers", "AssertionError: no code")
    assert "in crash" in answer.traceback


def test_ctrl_c_is_no_result() -> None:
    def interrupted(numbers: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(interrupted).run(CPU, "device", quick=True)


def test_what_opcheck_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("no fake")

    monkeypatch.setattr(KernelCheck, "opcheck", refuse)
    answer = check(lambda numbers: numbers * 2).run(CPU, "device", quick=True)
    assert (not answer.message, answer.wrong, answer.message) == (False, 0, "opcheck: RuntimeError: no fake")


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


def test_tolerances() -> None:
    assert tolerances(CPU, in_one_order=True) == {}
    assert tolerances(CPU)[torch.float32] == 1e-5
    assert tolerances(torch.device("cuda"), in_one_order=True) == ON_A_DEVICE
    assert mismatch(torch.tensor([1.00005]), torch.tensor([1.0]), ON_A_DEVICE) == ""


def test_the_kernels_of_the_host_are_right() -> None:
    answers = [check.run(device, name, quick=True) for check, device, name in kernels_here(CPU)]
    assert [answer for answer in answers if answer.message or answer.where != "host"] == []
    assert len(answers) == len(list(host_checks()))


def test_without_a_library_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "load", lambda: False)
    assert list(kernels_here(CPU)) == []


def test_every_operator_in_triton_is_looked_at() -> None:
    library.operators()
    known = {name.removeprefix("recfx::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    in_triton = {name for name in known if name.rstrip("_").endswith("_triton")}
    looked_at = {check.name.partition(":")[0] for check in device_checks()}
    assert len(in_triton) > 4
    assert in_triton - looked_at == set(), "recfx/doctor/checks.py has no line for it"
