"""Tests for a real device, up to the launch: their tensors are all on the device, and results are read from there."""

from __future__ import annotations

import pytest
import torch

from tests.ascend.cases import BY_NAME, CASES
from tests.ascend.kernel_case import assert_answered
from tests.ascend.npu_runtime.training import DEVICE

KERNELS = {case.kernel: case.name for case in CASES}


@pytest.mark.parametrize("name", KERNELS.values())
def test_calls_are_made_and_compared(name: str) -> None:
    case = BY_NAME[name]
    for build in case.calls.values():
        call = build(lambda tensor: tensor.to(DEVICE, copy=True))
        tensors = [argument for argument in call.arguments if isinstance(argument, torch.Tensor)]
        assert tensors
        assert {tensor.device for tensor in (*tensors, *call.keep, *(changed for changed, _ in call.also))} == {
            torch.device(DEVICE)
        }
        arguments = dict(zip(case.signature, call.arguments, strict=True))
        for parameter, expected in call.expected.items():
            arguments[parameter].copy_(expected)
        for changed, expected in call.also:
            changed.copy_(expected)
        assert_answered(case, call)
