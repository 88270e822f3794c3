"""What is done once in a process, before its first conversion and its first converted collection.

Torch and TorchRec have to know about converted collections by then, however the process got one: it may have converted
a model, made a collection, or read one from a pickle. Nothing else of recfx needs that, so importing recfx is cheap.
This file imports no torch.
"""

import threading
from collections.abc import Callable
from typing import Any

FIRST_USE: list[Callable[[], None]] = []
"""What is still to be done. ``recfx/__init__.py``, which runs before every other file of recfx, fills it."""

_LOCK = threading.RLock()


def first_use() -> None:
    """Do it, unless that was done; a step that raises an error is done again at the next use."""
    if FIRST_USE:
        with _LOCK:
            while FIRST_USE:
                FIRST_USE[0]()
                del FIRST_USE[0]


_MARK = "_recfx_extends"


def wrap_once(owner: Any, name: str, extend: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of torch or TorchRec with what ``extend`` makes of it, unless that was done before."""
    original = getattr(owner, name)
    if not getattr(original, _MARK, False):
        extended = extend(original)
        setattr(extended, _MARK, True)
        setattr(owner, name, extended)
