"""Batches in flight: hashed, but their gradients have not reached the tables yet. Their rows must keep their ids."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from recfx.hashing.index import NOTHING_IN_FLIGHT


class BatchInFlight:
    """One batch of training.

    It is over when every lookup of it has run its backward, or when nothing is left that could: the bags of rows and
    the autograd graph hold this object, nothing else does.

    Args:
        numbers: of the batch, by table.
    """

    def __init__(self, numbers: dict[str, int]) -> None:
        self.numbers = numbers
        self._lookups = 0
        self._is_over = False

    def watch(self, output: torch.Tensor) -> None:
        """A lookup of this batch gave ``output``; the batch is in flight until its backward has run."""
        if output.grad_fn is None:
            return
        self._lookups += 1
        output.grad_fn.register_hook(self._one_backward_less)

    def _one_backward_less(self, *gradients: Any) -> None:
        self._lookups -= 1
        self._is_over = self._lookups <= 0

    @property
    def is_over(self) -> bool:
        """Whether every lookup's backward has run."""
        return self._is_over


class BatchesInFlight:
    """All batches in flight of one collection."""

    def __init__(self) -> None:
        self._batches: weakref.WeakSet[BatchInFlight] = weakref.WeakSet()

    def start(self, numbers: dict[str, int]) -> BatchInFlight:
        """A batch has been hashed."""
        batch = BatchInFlight(numbers)
        self._batches.add(batch)
        return batch

    def oldest(self, table: str) -> int:
        """Number of the table's oldest batch in flight; a number later than any if there is none."""
        started = [batch.numbers[table] for batch in self._batches if not batch.is_over and table in batch.numbers]
        return min(started, default=NOTHING_IN_FLIGHT)
