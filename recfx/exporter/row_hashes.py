"""Hashes of the rows of a table, by which it is told later which rows have changed."""

import torch
from torch import Tensor

_PIECE = 2**16
"""How many words are hashed at once: as many as a core's cache holds as int64."""


def row_hashes(rows: Tensor) -> Tensor:
    """A hash of the bits of each row ``[n, dim]``, int64 ``[n]``: its words, times random odd numbers, added up modulo
    2**64 (multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast", 2014).

    Two rows that differ in one word alone never have the same; others do with a probability of 2**(k - 64), where
    2**k divides the differences of all their words: k is 0 for nearly all floats, and 16 for those of bfloat16.
    """
    row_bytes = rows.size(1) * rows.element_size()
    word = next(dtype for dtype in (torch.int32, torch.int16, torch.uint8) if row_bytes % dtype.itemsize == 0)
    words = row_bytes // word.itemsize
    generator = torch.Generator().manual_seed(20_261_129)
    factors = torch.randint(-(2**63), 2**63 - 1, (words,), generator=generator).bitwise_or_(1)
    hashes = torch.empty(rows.size(0), dtype=torch.int64)
    at = max(1, _PIECE // words)
    for piece, result in zip(rows.detach().split(at), hashes.split(at), strict=True):
        torch.mv(piece.cpu().resolve_neg().contiguous().view(word).long(), factors, out=result)
    return hashes
