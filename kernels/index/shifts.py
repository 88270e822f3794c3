"""Shifts of 64-bit integers on devices where only slow cores have them."""

from __future__ import annotations

import torch
from torch import Tensor


def shifted_right(numbers: Tensor, bits: int) -> Tensor:
    """``numbers >> bits``, but zeros come in from the left. Scriptable.

    Args:
        numbers: int64, any shape.
        bits: from 16 to 62.

    Returns:
        int64, the shape of ``numbers``, at least 0.
    """
    if numbers.device.type == "cpu" or numbers.device.type == "cuda":
        return (numbers >> bits) & ((1 << (64 - bits)) - 1)
    return shifted_by_floats(numbers, bits)


def shifted_by_floats(numbers: Tensor, bits: int) -> Tensor:
    """``shifted_right`` without a shift, which CANN does on the AI CPU of an Ascend 910B.

    At most 24 bits at a time become a float32, which holds them exactly, also after it is divided by a power of two.
    """
    first = max(bits, 40)
    high = (numbers & -(1 << first)).to(torch.float32) * 2.0**-first  # below 0 if the top bit is set
    shifted = high.to(torch.int64) & ((1 << (64 - first)) - 1)
    if bits < 40:
        low = (numbers & ((1 << 40) - (1 << bits))).to(torch.float32) * 2.0**-bits
        shifted = shifted * (1 << (40 - bits)) + low.to(torch.int64)
    return shifted
