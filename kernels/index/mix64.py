"""splitmix64's finalizer on signed 64-bit integers: the hash behind buckets, shared rows and initial weights.

``csrc/index/mix64.h`` has the same function. Products wrap around. The constants deliberately differ from those of the
slot table's hash: otherwise the ids of one bucket would cluster there.
"""

import torch
from torch import Tensor


def shifted_right(numbers: Tensor, bits: int) -> Tensor:
    """``numbers >> bits``, int64, by 16 to 62 ``bits``, but zeros come in from the left. Scriptable."""
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


def _finalize(z: Tensor) -> Tensor:
    # TorchScript cannot read global constants; these are 0xbf58476d1ce4e5b9 and 0x94d049bb133111eb.
    z = (z ^ shifted_right(z, 30)) * -4658895280553007687
    z = (z ^ shifted_right(z, 27)) * -7723592293110705685
    return z ^ shifted_right(z, 31)


def mix64(ids: Tensor, seed: int = 0) -> Tensor:
    """Mix each id, int64: the finalizer of ``id ^ finalizer(seed)``; for seed 0, that of ``id``. Scriptable."""
    if seed == 0:
        return _finalize(ids)
    mixed_seed = _finalize(torch.full([1], seed, dtype=torch.int64, device=ids.device))
    return _finalize(ids ^ mixed_seed)


def mix64_integer(value: int) -> int:
    """``mix64`` of one Python integer (any int64) without a tensor."""
    mask = 0xFFFFFFFFFFFFFFFF
    z = value & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return to_int64(z)


def to_int64(value: int) -> int:
    """The int64 with the same low 64 bits as ``value``."""
    value &= 0xFFFFFFFFFFFFFFFF
    return value - 2**64 if value >= 2**63 else value


def mixed_modulo(ids: Tensor, pieces: int, seed: int = 0) -> Tensor:
    """A piece in ``[0, pieces)`` for each id: ``(mix64(ids, seed) & INT64_MAX) % pieces``. Scriptable."""
    return torch.remainder(mix64(ids, seed) & 0x7FFFFFFFFFFFFFFF, pieces)
