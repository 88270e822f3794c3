"""To which of several segments that lie side by side each of a program's positions belongs."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def segments_of(first, places, inside, ends_ptr, count):
    """The segment of each place, int32.

    Args:
        first: the lowest of the places, a scalar.
        places: int64, ascending.
        inside: which of them count.
        ends_ptr: int64, where each segment ends; some may be empty.
        count: the number of segments.
    """
    low = 0
    high = count - 1
    while low < high:
        middle = low + (high - low) // 2
        if tl.load(ends_ptr + middle) <= first:
            low = middle + 1
        else:
            high = middle
    segments = tl.zeros_like(places).to(tl.int32) + low
    behind = inside & (segments < count - 1) & (places >= tl.load(ends_ptr + segments))
    while tl.max(behind.to(tl.int32), 0) > 0:
        segments += behind.to(tl.int32)
        behind = behind & (segments < count - 1) & (places >= tl.load(ends_ptr + segments))
    return segments
