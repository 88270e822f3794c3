"""Huge pages for big tensors that are read at random, where address translation otherwise costs as much as reading."""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from recfx.kernels.build import library

# Below this (a few huge pages) normal pages are as good, and huge ones would be mostly unused.
LEAST_BYTES = 8 << 20


def advise_huge_pages(tensor: Tensor) -> bool:
    """Ask for huge pages for a tensor: at once where nothing has been written to it yet. Its content does not change.

    This is a hint: if it is not supported, or if the tensor is small or not on the CPU, nothing happens. Returns
    whether the system took it.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < LEAST_BYTES or not library.load():
        return False
    return torch.ops.recfx.advise_huge_pages(tensor)


def move_to_huge_pages(tensors: Sequence[Tensor]) -> None:
    """Have the system move the content of big tensors to huge pages, in place. Their addresses and content stay.

    A hint, as above: what is not moved works as before, and the system may move it later. Nothing happens where its
    administrator has switched huge pages off, nor after a process has spent ``MOST_SECONDS`` on this.

    Args:
        tensors: any; those that are not contiguous are left alone.
    """
    global _spent
    begin = time.monotonic()
    moved = 0
    for tensor in tensors if _allowed() else ():
        if not (tensor.is_contiguous() and advise_huge_pages(tensor)):
            continue
        for first_byte, last_byte in _pieces(tensor):
            started = time.monotonic()
            if _spent >= MOST_SECONDS or not torch.ops.recfx.collapse_pages(tensor, first_byte, last_byte):
                break
            _spent += time.monotonic() - started
            moved += last_byte - first_byte
    seconds = time.monotonic() - begin
    if seconds >= 1.0:
        _logger.info("moved %d MB of tables to huge pages in %.1f s; this is done once", moved >> 20, seconds)


MOST_SECONDS = 10.0
"""How long a process may have tensors moved, in all: it takes about two seconds per GB."""

_spent = 0.0
_AT_ONCE = 64 << 20
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_logger = logging.getLogger("recfx")


def _pieces(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """The bytes of a tensor in pieces that end where a huge page ends; each but the last has a whole one."""
    huge_page = _huge_page()
    at_once = max(_AT_ONCE, 2 * huge_page)
    first_byte, beyond = 0, tensor.data_ptr() % huge_page
    while first_byte < tensor.nbytes:
        last_byte = min((first_byte + beyond + at_once) // huge_page * huge_page - beyond, tensor.nbytes)
        yield first_byte, last_byte
        first_byte = last_byte


def _allowed() -> bool:
    try:
        return "[never]" not in _ENABLED.read_text()
    except OSError:
        return False


def _huge_page() -> int:
    """The bytes of a huge page: 2 MiB, or 512 MiB on an aarch64 whose pages have 64 KiB. Linux says so since 4.10."""
    size = _ENABLED.with_name("hpage_pmd_size")
    return int(size.read_text()) if size.exists() else 2 << 20


def full_on_huge_pages(shape: tuple[int, ...], value: float, device: torch.device) -> Tensor:
    """``torch.full`` in float32, on huge pages if the tensor is big and they are to be had."""
    made = torch.empty(shape, dtype=torch.float32, device=device)
    advise_huge_pages(made)
    return made.fill_(value)


@library.fake("advise_huge_pages", "collapse_pages")
def _fake(*arguments: object) -> bool:
    return False
