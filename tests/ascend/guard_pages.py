"""Memory that ends, or begins, exactly at a page that nobody may touch."""

import ctypes
import faulthandler
import mmap
import os
from collections.abc import Callable
from functools import partial

import torch

from tests.ascend.kernel_case import Place

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NO_ACCESS = 0


def guarded(side: str) -> Place:
    """Copies tensors to memory whose ``"end"`` or ``"begin"`` is at a guard page; any access past it is a SIGSEGV.

    Processes forked from this one share the memory, so that what a launch has written can be read afterwards.
    """
    return partial(_guarded_copy, at_end={"begin": False, "end": True}[side])


def _guarded_copy(tensor: torch.Tensor, at_end: bool) -> torch.Tensor:
    size = tensor.numel() * tensor.element_size()
    page = mmap.PAGESIZE
    pages = max(1, -(-size // page))
    memory = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (start, start + (pages + 1) * page):
        if _libc.mprotect(guard, page, _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = page + (pages * page - size if at_end else 0)
    if size == 0:  # there is no such buffer; the address matters all the same
        return tensor.clone()
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).view(tensor.shape)
    copy.copy_(tensor)
    return copy


def signal_of(launch: Callable[[], None]) -> int:
    """Run ``launch`` in a forked process: 0 if it ends well, else the number of the signal that ended it."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # a signal may be what is expected
        status = 1
        try:
            launch()
            status = 0
        finally:
            os._exit(status)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if ended > 0:
        raise RuntimeError("the launch raised an error in Python, see above")
    return -ended
