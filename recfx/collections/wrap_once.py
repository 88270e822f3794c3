"""How functions of torch and TorchRec are taught about converted collections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MARK = "_recfx_extends"


def wrap_once(owner: Any, name: str, extend: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of ``owner`` with what ``extend`` makes of it, unless that was done before."""
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return
    extended = extend(original)
    setattr(extended, _MARK, True)
    setattr(owner, name, extended)
