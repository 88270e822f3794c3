"""Batches whose check the host does not wait for: the device answers later, and the batch is harmless until then.

The device empties the bags of a batch that is wrong, so that none of its ids is read. It is refused when its backward
begins, before any table of that backward pass has changed; without a backward, in the next forward of its collection.
The host asks whether the device has answered, and waits only if it has not even begun with the batch by then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from recfx.runtime.in_flight import nodes_of
from recfx.runtime.transfers import CopyToHost


class _LateCheck:
    """The check of one batch. ``wrong`` is int64 ``[]`` on its device, not 0 if it is wrong; ``refuse`` raises then."""

    def __init__(self, wrong: torch.Tensor, refuse: Callable[[], None]) -> None:
        self._said = CopyToHost([wrong])
        self._refuse: Callable[[], None] | None = refuse
        self.is_told = False

    def settle(self, again: bool = False) -> None:
        """Raise if the batch is wrong, once, or ``again``; free what is held of one that is right."""
        if self._refuse is None or (self.is_told and not again):
            return
        if bool(self._said.wait()[0]):
            self.is_told = True
            self._refuse()
        self._refuse = None


class _Pending(threading.local):
    def __init__(self) -> None:  # of each thread: the check of the last batch of each node
        self.of_node: weakref.WeakKeyDictionary[nn.Module, _LateCheck] = weakref.WeakKeyDictionary()


_pending = _Pending()
_any: list[bool] = []  # empty until there is a check: where batches are on the host, nothing else is asked


def check_later(node: nn.Module, wrong: torch.Tensor, refuse: Callable[[], None]) -> None:
    """``refuse`` a batch of ``node`` later, if ``wrong``, int64 ``[]`` on the batch's device, is not 0."""
    _any[:] = [True]
    _pending.of_node[node] = _LateCheck(wrong, refuse)


def settle(node: nn.Module) -> None:
    """Raise if the last batch that this thread has given to ``node`` is wrong, and that has not been said."""
    if _any and (check := _pending.of_node.pop(node, None)) is not None:
        check.settle()


def settle_before_backward(outputs: Iterable[torch.Tensor]) -> None:
    """Let the backward of a lookup's ``outputs`` settle what is pending of this thread before any table changes: its
    own batch, and what other collections have read by then.
    """
    if not _any or not torch.is_grad_enabled():
        return
    pending = _pending.of_node  # the backward may run on another thread
    own = [check for check in pending.values() if not check.is_told]
    if not own:
        return

    def settle_all(*gradients: Any) -> None:
        for check in own:
            check.settle(again=True)
        for check in list(pending.values()):
            check.settle()

    for node in nodes_of(outputs):
        node.register_prehook(settle_all)
