"""``mix64.py`` in Triton.

On Ascend, vectors of int64 would become loops over their elements, and shifts of unsigned ones come out wrong. Signed
scalars with masked shifts are right everywhere; vectors are computed in int32, by limbs of 11 bits: six of them make 64
bits, and no sum of their products overflows. What a vector's shift drops is cleared before, in case it is rounded to.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix64(z):
    """``mix64`` of a scalar, with seed 0."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def mix63(key, mixed_seed):
    """The low 63 bits of ``mix64(key, seed)``: what ``mixed_modulo`` takes the remainder of.

    ``mixed_seed`` is ``mix64_integer(seed)``, but 0 for seed 0.
    """
    return mix64(key ^ mixed_seed) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def mixed_top_bits(start, counts):
    """The top 24 bits of ``mix64(start + counts * 0x9E3779B97F4A7C15)``, int32.

    Args:
        start: a scalar, int64.
        counts: a vector, int32, from 0 to 2**19.
    """
    z0, z1, z2, z3, z4, z5 = _carried(
        (start & 2047).to(tl.int32) + counts * 1045, ((start >> 11) & 2047).to(tl.int32) + counts * 335,
        ((start >> 22) & 2047).to(tl.int32) + counts * 1533, ((start >> 33) & 2047).to(tl.int32) + counts * 1244,
        ((start >> 44) & 2047).to(tl.int32) + counts * 887, ((start >> 55) & 511).to(tl.int32) + counts * 316,
    )  # fmt: skip
    z0, z1, z2, z3 = z0 ^ _cut(z2, z3, 8), z1 ^ _cut(z3, z4, 8), z2 ^ _cut(z4, z5, 8), z3 ^ ((z5 & -256) >> 8)
    z0, z1, z2, z3, z4, z5 = _product(z0, z1, z2, z3, z4, z5, 1465, 1180, 1139, 950, 1412, 382)
    z0, z1, z2, z3 = z0 ^ _cut(z2, z3, 5), z1 ^ _cut(z3, z4, 5), z2 ^ _cut(z4, z5, 5), z3 ^ ((z5 & -32) >> 5)
    z0, z1, z2, z3, z4, z5 = _product(z0, z1, z2, z3, z4, z5, 491, 1570, 1100, 1245, 1284, 297)
    return ((z3 & -128) >> 7) + z4 * 16 + z5 * 32768  # the last shift of mix64 does not reach these bits


@triton.jit
def _cut(low, high, BITS: tl.constexpr):
    """Two neighbouring limbs without the lowest bits of the lower one, as one limb."""
    return ((low & -(1 << BITS)) >> BITS) + (high & ((1 << BITS) - 1)) * (1 << (11 - BITS))


@triton.jit
def _product(
    z0, z1, z2, z3, z4, z5,
    m0: tl.constexpr, m1: tl.constexpr, m2: tl.constexpr, m3: tl.constexpr, m4: tl.constexpr, m5: tl.constexpr,
):  # fmt: skip
    """The low 64 bits of a product."""
    return _carried(
        z0 * m0, z0 * m1 + z1 * m0, z0 * m2 + z1 * m1 + z2 * m0, z0 * m3 + z1 * m2 + z2 * m1 + z3 * m0,
        z0 * m4 + z1 * m3 + z2 * m2 + z3 * m1 + z4 * m0, z0 * m5 + z1 * m4 + z2 * m3 + z3 * m2 + z4 * m1 + z5 * m0,
    )  # fmt: skip


@triton.jit
def _carried(c0, c1, c2, c3, c4, c5):
    """Sums of each place as limbs, the last of which has 9 bits."""
    c1 += (c0 & -2048) >> 11
    c2 += (c1 & -2048) >> 11
    c3 += (c2 & -2048) >> 11
    c4 += (c3 & -2048) >> 11
    c5 += (c4 & -2048) >> 11
    return c0 & 2047, c1 & 2047, c2 & 2047, c3 & 2047, c4 & 2047, c5 & 511
