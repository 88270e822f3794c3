"""Ids that somebody chose who knows the hashes, and inverted them."""

import torch

from recfx.kernels.index.mix64 import to_int64


def unshifted(mixed: torch.Tensor, shift: int) -> torch.Tensor:
    """The ``k`` of ``mixed = k ^ (k >> shift)``, of int64 as unsigned numbers."""
    mask, k = (1 << (64 - shift)) - 1, mixed
    for _ in range(64 // shift):
        k = mixed ^ ((k >> shift) & mask)
    return k


def _undone(mixed: torch.Tensor, last: int, rounds: list[tuple[int, int]]) -> torch.Tensor:
    k = unshifted(mixed, last)
    for factor, shift in rounds:
        k = unshifted(k * to_int64(pow(factor, -1, 2**64)), shift)
    return k


def slot_hash_inverse(hashes: torch.Tensor) -> torch.Tensor:
    """The ids that have these hashes (``slot_table.slot_hash``)."""
    return _undone(hashes, 33, [(0xC4CEB9FE1A85EC53, 33), (0xFF51AFD7ED558CCD, 33)])


def mix64_inverse(mixed: torch.Tensor) -> torch.Tensor:
    """The ids that ``mix64`` turns into these numbers."""
    return _undone(mixed, 31, [(0x94D049BB133111EB, 27), (0xBF58476D1CE4E5B9, 30)])


def of_one_slot(count: int, begin: int = 0) -> torch.Tensor:
    """Distinct ids with one home in every slot table of up to 2**20 slots, by the upper bits of the hash or the lower.

    int64 ``[count]``, for ``begin + count <= 2**24``.
    """
    return slot_hash_inverse((1 << 62) + (torch.arange(begin, begin + count) << 20) + 5)


def of_one_bucket(count: int, bucket: int = 0, buckets: int = 64) -> torch.Tensor:
    """Distinct ids of one bucket of a table whose ``HashConfig.seed`` is 0: int64 ``[count]``."""
    return mix64_inverse(torch.arange(1, count + 1) * buckets + bucket)
