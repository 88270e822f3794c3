"""What kernels in Triton read and write in the forms that Ascend's compiler lets overlap."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import inspect

import triton
import triton.language as tl

if "care_padding" in inspect.signature(tl.load).parameters:  # triton-ascend; stock Triton fills nothing by itself

    @triton.jit
    def prefix_at(ptr, columns, count):
        """The first ``count`` values from a pointer on; the columns behind them are undefined.

        Zeros there would be written by the vector unit, and copying would wait for it.
        """
        return tl.load(ptr + columns, mask=columns < count, care_padding=False)

    @triton.jit
    def side_by_side(first, second):
        """Two vectors of one width as one. Ascend's ``cat`` keeps the order."""
        return tl.cat(first, second, can_reorder=True)

else:

    @triton.jit
    def prefix_at(ptr, columns, count):
        """The first ``count`` values from a pointer on; the columns behind them are undefined."""
        return tl.load(ptr + columns, mask=columns < count)

    @triton.jit
    def side_by_side(first, second):
        """Two vectors of one width as one."""
        return tl.reshape(tl.permute(tl.join(first, second), (1, 0)), (2 * first.shape[0],))
