"""The counts of eval mode, added up on a device until someone reads them, so that no batch waits for it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from recfx.hashing import HashIndex
from recfx.kernels import host
from recfx.runtime.host_copies import HOST, pins


class CountsOnDevice:
    """How many ids of each table were seen in eval mode, and how many of them had no row of their own.

    Threads may add to them, on streams of their own. Indexes keep the counts alive, which therefore refer to nothing
    that holds weights.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._indexes: list[weakref.ref[HashIndex] | None] = []
        self._device: torch.device | None = None
        self._of_stream: dict[Any, torch.Tensor] = {}

    def add(self, indexes: Sequence[HashIndex | None], seen: torch.Tensor, absent: torch.Tensor) -> None:
        """Count one batch; the host does not wait.

        Args:
            indexes: the index of each table; None for tables without one.
            seen, absent: int64 ``[tables]``, on the device.
        """
        device = seen.device
        with self._lock:
            if [None if each is None else each() for each in self._indexes] != list(indexes) or self._device != device:
                self.fold()
                self._indexes = [None if index is None else weakref.ref(index) for index in indexes]
                self._device = device
            stream = torch.get_device_module(device).current_stream(device) if pins(device.type) else None
            counted = self._of_stream.get(stream)
            if counted is None:
                with torch.inference_mode(False):  # batches outside of inference mode are added as well
                    counted = self._of_stream[stream] = torch.zeros(seen.numel(), 2, dtype=torch.int64, device=device)
                for index in indexes:
                    if index is not None:
                        index.counted_elsewhere(self)
            counted.add_(torch.stack([seen, absent], dim=1))

    def fold(self) -> None:
        """Add the counts to those of the indexes, and begin anew; waits for the device."""
        with self._lock:
            if not self._of_stream:
                return
            if self._device is not None and self._device.type not in HOST:
                torch.get_device_module(self._device).synchronize(self._device)
            counts = torch.stack([counted.cpu() for counted in self._of_stream.values()]).sum(0).tolist()
            self._of_stream = {}
            found = [
                (None if each is None else each(), count) for each, count in zip(self._indexes, counts, strict=True)
            ]
            present = [(index, count) for index, count in found if index is not None and not index.eval_counts.is_meta]
            amounts = [amount for _, count in present for amount in count]
            host.hash_index().add_counts([index.eval_counts for index, _ in present], amounts)
