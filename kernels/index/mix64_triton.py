"""``mix64.py`` in Triton, for scalars.

On Ascend, vectors of int64 would become loops over their elements, and shifts of unsigned ones come out wrong; signed
scalars with masked shifts are right everywhere.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it in every module with kernels)


@triton.jit
def mix63(key, mixed_seed):
    """The low 63 bits of ``mix64(key, seed)``: what ``mixed_modulo`` takes the remainder of.

    ``mixed_seed`` is ``mix64_integer(seed)``, but 0 for seed 0.
    """
    z = key ^ mixed_seed
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (z ^ ((z >> 31) & 0x1FFFFFFFF)) & 0x7FFFFFFFFFFFFFFF
