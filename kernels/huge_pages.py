"""Huge pages behind big tensors that are read at random: address translations cost as much as the reads otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from . import library

# Below this (a few huge pages) the system's small ones are as good, and huge ones would be mostly unused.
LEAST_BYTES = 8 << 20


def advise_huge_pages(tensor: Tensor) -> bool:
    """Ask for huge pages behind a tensor; for memory that nothing has been written to yet. Changes no content.

    A hint: where it is not supported, or where the tensor is small or not in the CPU's memory, nothing happens.

    Args:
        tensor: contiguous, any shape and dtype.

    Returns:
        Whether the system took the hint.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < LEAST_BYTES or not library.load():
        return False
    taken: bool = torch.ops.recfx.advise_huge_pages(tensor)
    return taken
