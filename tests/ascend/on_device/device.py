"""The device that tests of kernels run on, and how close their results have to be."""

import os
from typing import Any

import pytest
import torch

from recfx.commandline.doctor import checks as compare

NAME = "RECFX_KERNELS_ON"


def device() -> torch.device:
    """The one that ``RECFX_KERNELS_ON`` names, or else an NPU, or a GPU; without any, the test is skipped."""
    named = os.environ.get(NAME, "")
    here = [kind for kind in ("npu", "cuda") if hasattr(torch, kind) and getattr(torch, kind).is_available()]
    if not named and not here:
        pytest.skip(f"there is no NPU and no CUDA device, and {NAME} names no other")
    return torch.device(named or here[0])


def moved(values: Any) -> Any:
    """A copy of ``values``, with every tensor on the device in memory of its own."""
    return compare.moved(values, device())


def assert_same(actual: Any, expected: Any, in_one_order: bool = False) -> None:
    """Tensors in the same places are alike: numbers within the tolerance of their dtype, integers exactly.

    Args:
        actual, expected: tensors, or sequences of them.
        in_one_order: both add up in one order: in the interpreter, numbers are equal bit for bit.
    """
    told = compare.mismatch(actual, expected, compare.tolerances(device(), in_one_order))
    assert not told, told
