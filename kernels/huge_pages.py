"""Huge pages for big tensors that are read at random, where address translation otherwise costs as much as reading."""

from __future__ import annotations

import torch
from torch import Tensor

from . import library

# Below this (a few huge pages) normal pages are as good, and huge ones would be mostly unused.
LEAST_BYTES = 8 << 20


def advise_huge_pages(tensor: Tensor) -> bool:
    """Ask for huge pages for a tensor that nothing has been written to yet. Its content does not change.

    This is a hint: if it is not supported, or if the tensor is small or not on the CPU, nothing happens.

    Args:
        tensor: contiguous, any shape and dtype.

    Returns:
        Whether the system took the hint.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < LEAST_BYTES or not library.load():
        return False
    taken: bool = torch.ops.recfx.advise_huge_pages(tensor)
    return taken


def full_on_huge_pages(shape: tuple[int, ...], value: float, device: torch.device) -> Tensor:
    """``torch.full`` in float32, on huge pages if the tensor is big and they are to be had."""
    made = torch.empty(shape, dtype=torch.float32, device=device)
    advise_huge_pages(made)
    return made.fill_(value)
