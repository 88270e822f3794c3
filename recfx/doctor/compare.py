"""Whether a kernel left what its reference left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# A GPU fuses multiplications and additions, and its division and square root may be a bit off.
ON_A_DEVICE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
ON_THE_CPU = ON_A_DEVICE | {torch.float32: 1e-5}


def tolerances(device: torch.device, in_one_order: bool = False) -> Mapping[torch.dtype, float]:
    """Absolute and relative, by dtype; 0 for all that are not listed.

    Args:
        device: on which the kernel ran.
        in_one_order: kernel and reference add up in one order: on the CPU, numbers are then equal bit for bit.
    """
    return ON_A_DEVICE if device.type != "cpu" else {} if in_one_order else ON_THE_CPU


def mismatch(actual: Any, expected: Any, allowed: Mapping[torch.dtype, float]) -> str:
    """What differs, in one line; ``""`` if nothing does. Integers, shapes and dtypes have to be equal.

    Args:
        actual: a tensor, None, or a sequence of these, on any device.
        expected: likewise, on the CPU.
        allowed: see ``tolerances``.
    """
    if isinstance(actual, Sequence) and isinstance(expected, Sequence):
        if len(actual) != len(expected):
            return f"{len(actual)} results instead of {len(expected)}"
        mismatches = (mismatch(one, other, allowed) for one, other in zip(actual, expected, strict=True))
        return next((f"result {place}: {text}" for place, text in enumerate(mismatches) if text), "")
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        return (
            ""
            if actual is None and expected is None
            else f"{type(actual).__name__} instead of {type(expected).__name__}"
        )
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"{actual.dtype} {list(actual.shape)} instead of {expected.dtype} {list(expected.shape)}"
    tolerance = allowed.get(expected.dtype, 0.0)
    try:
        torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def moved(values: Any, device: torch.device) -> Any:
    """A copy of ``values``, with every tensor on the device in memory of its own."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), values)
