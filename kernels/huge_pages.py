"""Huge pages for big tensors that are read at random, where address translation otherwise costs as much as reading."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

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


def move_to_huge_pages(tensors: Sequence[Tensor]) -> None:
    """Have the system move the content of big tensors to huge pages, in place. Their addresses and content stay.

    A hint, as above: what is not moved works as before, and the system may move it later. Nothing happens where its
    administrator has switched huge pages off, nor after a process has spent ``MOST_SECONDS`` on this.

    Args:
        tensors: any; those that are not contiguous are left alone.
    """
    global _spent
    for tensor in tensors if _allowed() else ():
        if not (tensor.is_contiguous() and advise_huge_pages(tensor)):
            continue
        for first_byte in range(0, tensor.nbytes, _AT_ONCE):
            if _spent >= MOST_SECONDS:
                break
            begin = time.monotonic()
            last_byte = min(first_byte + _AT_ONCE, tensor.nbytes)
            moved = torch.ops.recfx.collapse_pages(tensor, first_byte, last_byte)
            _spent += time.monotonic() - begin
            if not moved:
                break


MOST_SECONDS = 10.0
"""How long a process may have tensors moved, in all: it takes about a second per GB."""

_spent = 0.0
_AT_ONCE = 64 << 20
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _allowed() -> bool:
    try:
        return "[never]" not in _ENABLED.read_text()
    except OSError:
        return False


def full_on_huge_pages(shape: tuple[int, ...], value: float, device: torch.device) -> Tensor:
    """``torch.full`` in float32, on huge pages if the tensor is big and they are to be had."""
    made = torch.empty(shape, dtype=torch.float32, device=device)
    advise_huge_pages(made)
    return made.fill_(value)
