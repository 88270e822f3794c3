"""Where bags begin, from their lengths."""

import torch
from torch import Tensor


def from_zero(lengths: Tensor, most: int) -> Tensor:
    """Where bags of these lengths begin, and where the last one ends. Scriptable.

    Sums are int32 where they fit: CANN adds up int64 on the AI CPU of an Ascend 910B. If one is larger than ``most``,
    it and all behind it are meaningless.
    """
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    offsets[1:] = lengths.cumsum(0, dtype=torch.int32 if most < 2**31 else torch.int64)
    return offsets
