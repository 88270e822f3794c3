"""The device that tests of kernels run on, and how close their results have to be."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

NAME = "RECFX_KERNELS_ON"
# A GPU fuses multiplications and additions, and its division and square root may be a bit off.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
INTERPRETED = TOLERANCE | {torch.float32: 1e-5}


def device() -> torch.device:
    """The one that ``RECFX_KERNELS_ON`` names, by default ``cuda``; without it, the test is skipped."""
    named = torch.device(os.environ.get(NAME, "cuda"))
    if named.type == "cuda" and not torch.cuda.is_available():
        pytest.skip(f"there is no CUDA device, and {NAME} names no other")
    return named


def moved(values: Any) -> Any:
    """The same structure with copies of its tensors on the device, each in memory of its own."""
    place = device()
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(place, copy=True), values)


def assert_same(found: Any, wanted: Any, in_one_order: bool = False) -> None:
    """Tensors in the same places are alike: numbers within the tolerance of their dtype, integers exactly.

    Args:
        found, wanted: tensors, or sequences of them.
        in_one_order: both add up in one order: in the interpreter, numbers are equal bit for bit.
    """
    assert isinstance(found, torch.Tensor) == isinstance(wanted, torch.Tensor)
    if not isinstance(wanted, torch.Tensor):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other, in_one_order)
        return
    assert found.dtype == wanted.dtype
    tolerances = TOLERANCE if device().type != "cpu" else {} if in_one_order else INTERPRETED
    tolerance = tolerances.get(wanted.dtype, 0.0)
    torch.testing.assert_close(found.cpu(), wanted, rtol=tolerance, atol=tolerance)
